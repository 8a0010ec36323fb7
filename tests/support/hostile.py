"""Inputs that find mistakes in kernels: NaN in memory, odd strides, extreme scores, unseen rows."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new uninitialised tensors with NaN, or the largest integer."""

    def poisoned(make):
        def poison(*args, **kwargs) -> Tensor:
            return fill_with_poison(make(*args, **kwargs))

        return poison

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poisoned(Tensor.new_empty)),
    ):
        yield


def fill_with_poison(tensor: Tensor) -> Tensor:
    """NaN, or the largest integer, everywhere."""
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        return tensor.fill_(torch.iinfo(tensor.dtype).max)


def amid_nan(tensor: Tensor, last: int = 1) -> Tensor:
    """A view with the values of ``tensor`` and NaN around its rows; ``last`` is its last stride."""
    around = [n + 3 for n in tensor.shape[:-1]] + [tensor.shape[-1] * last + 16]
    buffer = tensor.new_full(around, torch.nan)
    view = buffer[tuple(slice(1, 1 + n) for n in tensor.shape[:-1])]
    view = view[..., 8 : 8 + tensor.shape[-1] * last : last]
    return view.copy_(tensor)


def visible_pairs(spans, queries: int, keys: int, window: int | None = None) -> Tensor:
    """Bool [S_q, S_k], pair by pair; with a window its last keys up to a query's position."""
    table = torch.zeros(queries, keys, dtype=torch.bool)
    for span in spans:
        hidden = torch.zeros(table[span.queries, span.keys].shape, dtype=torch.bool)
        if span.causal_offset is not None:
            hidden = torch.ones_like(hidden).triu(span.causal_offset + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(span.causal_offset - window)
        table[span.queries, span.keys] = ~hidden
    return table


def in_no_span(spans, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Bool [S_q] and [S_k]."""
    no_query, no_key = torch.ones(queries).bool(), torch.ones(keys).bool()
    for span in spans:
        no_query[span.queries], no_key[span.keys] = False, False
    return no_query, no_key


@dataclass(frozen=True)
class Case:
    """One call of attention over the latent [S, B, C + R]; what is in no span holds NaN."""

    queries: int
    keys: int
    spans: Spans | tuple[Span, ...]
    heads: int = 16
    batch: int = 1
    content: int = 32
    rope: int = 16
    dtype: torch.dtype = torch.bfloat16
    # Standard deviation of queries and keys.
    magnitude: float = 1.0
    lse_gradient: bool = True
    # Of the operands' last dimension.
    last_stride: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", Spans(self.spans))

    @property
    def rules(self) -> ScoreRules:
        """The rules of the call; chunks are small, so that the reference computes several."""
        scale = (self.content + self.rope) ** -0.5
        return ScoreRules(scale, self.spans, query_chunk_size=64)

    def operands(self, device: torch.device) -> AttentionInputs:
        """Random, without NaN."""
        torch.manual_seed(self.queries)
        q = self._random(device, self.queries, self.batch, self.heads, self.content + self.rope)
        kv = self._random(device, self.keys, self.batch, self.content + self.rope)
        c = self.content
        return AttentionInputs(q[..., :c], q[..., c:], kv[..., None, :c], kv[..., c:], None)

    def gradient(self, device: torch.device) -> OutputGradient:
        """Random, without NaN."""
        torch.manual_seed(self.keys)
        shape = (self.queries, self.batch, self.heads)
        out = torch.randn(*shape, self.content, device=device).to(self.dtype)
        lse = torch.randn(shape, device=device) if self.lse_gradient else None
        return OutputGradient(out, lse)

    def _random(self, device: torch.device, *shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * self.magnitude).to(self.dtype)

    def visible(self) -> Tensor:
        """Bool [S_q, S_k], pair by pair."""
        return visible_pairs(self.spans, self.queries, self.keys)

    def hide(self, operands: AttentionInputs, grad: OutputGradient) -> tuple:
        """The same values inside buffers of NaN; tokens in no span are NaN, too."""
        no_query, no_key = in_no_span(self.spans, self.queries, self.keys)

        def hidden(x: Tensor | None, rows: Tensor) -> Tensor | None:
            if x is None:
                return None
            x = x.clone()
            x[rows.to(x.device)] = torch.nan
            return amid_nan(x, self.last_stride)

        q = [hidden(x, no_query) for x in operands[:2]]
        k = [hidden(x, no_key) for x in operands[2:4]]
        return AttentionInputs(*q, *k, None), OutputGradient(*(hidden(x, no_query) for x in grad))


def evaluate(
    case: Case, operands: AttentionInputs, grad: OutputGradient, dtype: torch.dtype
) -> dict:
    """Output, LSE and gradients from PyTorch's autograd in ``dtype``."""
    qc, qr, kc, kr = (x.detach().to(dtype).requires_grad_() for x in operands[:4])
    scores = torch.einsum("qbnd,kbd->qbnk", qc, kc[:, :, 0])
    scores = (scores + torch.einsum("qbnr,kbr->qbnk", qr, kr)) * case.rules.scale
    visible = case.visible().to(qc.device)[:, None, None]
    scores = scores.masked_fill(~visible, -torch.inf)
    blind = ~visible.any(-1)
    lse = scores.logsumexp(-1).masked_fill(blind, 0.0)
    probs = torch.exp(scores - lse[..., None])
    out = torch.einsum("qbnk,kbd->qbnd", probs, kc[:, :, 0])
    outputs, grads = [out], [grad.out.to(dtype)]
    if grad.lse is not None:
        outputs, grads = [out, lse], [*grads, grad.lse.to(dtype)]
    found = torch.autograd.grad(outputs, (qc, qr, kc, kr), grads, allow_unused=True)
    found = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, (qc, qr, kc, kr)))
    lse = lse.masked_fill(blind, -torch.inf)
    return named(AttentionOutput(out, lse), AttentionInputs(*found, None))


def named(attended: AttentionOutput, grads: AttentionInputs) -> dict[str, Tensor]:
    names = ("out", "lse", "dq_content", "dq_rope", "dlatent", "dk_rope")
    return dict(zip(names, (*(x.detach() for x in attended), *grads[:4])))
