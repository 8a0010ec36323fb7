"""DeepSeek Sparse Attention in float64 on one process, from the papers' equations.

The ground truth of the tests of sparse attention, on top of :mod:`tests.oracle`, whose projections
and rotary table it takes. DeepSeek-V3.2 (arXiv:2512.02556), section 2.1: the indexer's scores, the
choice of the k best keys of every query, the attention over them, and the two stages in which the
indexer learns by KL divergence. Scores are whole [S, S] matrices and gradients are autograd's.

Beside the letters of :mod:`tests.oracle`:

    Hi  heads of the indexer
    Di  width of one of them
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.oracle import (
    OracleMLA,
    Table,
    TokenSequence,
    at_least_float32,
    probabilities,
    rms_norm,
    scores_and_values,
)
from tests.oracle import output as layer_output


@dataclass(frozen=True, kw_only=True)
class OracleDSA:
    """An MLA layer with an indexer.

    Weights are those of ``mla`` and the indexer's:

        i_wq   [Hi * Di, q_lora_rank], or [Hi * Di, hidden] if q_lora_rank is None
        i_wk   [Di, hidden],  i_k_gain [Di],  i_k_bias [Di]
        i_w    [Hi, hidden]

    Attributes:
        mla: The layer without its indexer.
        heads: Hi.
        width: Di; the first ``mla.rope`` channels are rotated.
        topk: Keys that a query attends to.
        interleaved: Whether the rotated channels are pairs (0, 1), (2, 3), ... (GLM-5), or channel
            i goes with channel i + rope / 2 (DeepSeek-V3.2).
        hadamard: Whether queries and keys are multiplied by the Hadamard matrix over sqrt(Di).
        relu: Whether products of queries and keys pass a ReLU.
        k_norm_eps: Epsilon of the keys' LayerNorm.
    """

    mla: OracleMLA
    heads: int
    width: int
    topk: int
    interleaved: bool = False
    hadamard: bool = True
    relu: bool = True
    k_norm_eps: float = 1e-6

    @property
    def hidden(self) -> int:
        return self.mla.hidden

    def indexer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight of the indexer."""
        hidden = self.mla.hidden
        return {
            "i_wq": (self.heads * self.width, self.mla.q_lora_rank or hidden),
            "i_wk": (self.width, hidden),
            "i_k_gain": (self.width,),
            "i_k_bias": (self.width,),
            "i_w": (self.heads, hidden),
        }

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every weight."""
        return self.mla.weight_shapes() | self.indexer_shapes()


@dataclass(frozen=True, kw_only=True)
class OracleLoss:
    """How the indexer learns.

    Attributes:
        coefficient: Multiplies the loss.
        sparse: Whether target and prediction are distributions over the chosen keys alone (the
            sparse stage), or over all visible keys (the warm-up).
        per_token: Whether the loss is the sum over the queries that are tokens, or their mean.
    """

    coefficient: float = 1.0
    sparse: bool = True
    per_token: bool = False


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * gain + bias over the last dim."""
    wide = at_least_float32(x)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt(variance + eps)
    return (normed * at_least_float32(gain) + at_least_float32(bias)).to(x.dtype)


def rotate_channels(x: Tensor, table: Table, interleaved: bool) -> Tensor:
    """Rotate the pairs of ``x`` [S, H, rope]; every channel stays where it is."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    cos, sin = (t[: len(x), None].to(at_least_float32(x).dtype) for t in table)
    real = first * cos - second * sin
    imaginary = first * sin + second * cos
    if interleaved:
        return torch.stack((real, imaginary), dim=-1).flatten(-2).to(x.dtype)
    return torch.cat((real, imaginary), dim=-1).to(x.dtype)


def hadamard_matrix(size: int) -> Tensor:
    """Entry (i, j) is (-1)^(number of ones in i & j): float64 [size, size], Sylvester's order."""
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64)


def query_latent(mla: OracleMLA, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the indexer's queries are projected from: the normalised latent, else the input."""
    if mla.q_lora_rank is None:
        return x
    compressed = x @ w["w_dq"].T
    return rms_norm(compressed, w["q_norm"], mla.norm_eps) if mla.latent_norm else compressed


def index_vectors(
    dsa: OracleDSA, w: dict[str, Tensor], x: Tensor, qr: Tensor, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [S, Hi, Di], keys [S, Di] and scaled head weights [S, Hi] of one sequence."""
    rope = dsa.mla.rope
    query = (qr @ w["i_wq"].T).view(len(x), dsa.heads, dsa.width)
    key = layer_norm(x @ w["i_wk"].T, w["i_k_gain"], w["i_k_bias"], dsa.k_norm_eps)[:, None]
    if rope:
        query, key = (
            torch.cat((rotate_channels(t[..., :rope], table, dsa.interleaved), t[..., rope:]), -1)
            for t in (query, key)
        )
    if dsa.hadamard:
        matrix = hadamard_matrix(dsa.width).to(x.dtype) / math.sqrt(dsa.width)
        query, key = query @ matrix, key @ matrix
    weights = x @ w["i_w"].T / math.sqrt(dsa.heads) / math.sqrt(dsa.width)
    return query, key[:, 0], weights


def index_scores(dsa: OracleDSA, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """I[t, s] = sum_j weights[t, j] ReLU(query[t, j] . key[s]), [S, S]."""
    products = torch.einsum("thd,sd->ths", query, key)
    if dsa.relu:
        products = torch.relu(products)
    return torch.einsum("th,ths->ts", weights, products)


def select(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The ``topk`` visible keys of every query: highest score first, then lowest index.

    bool [S, S], True where a key is chosen; all visible keys where there are no more.
    """
    chosen = torch.zeros_like(visible)
    for query, row in enumerate(scores.tolist()):
        keys = visible[query].nonzero().flatten().tolist()
        keys.sort(key=lambda s: (-row[s], s))
        chosen[query, keys[:topk]] = True
    return chosen


def kl_of_rows(of_heads: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """KL(p || softmax(I)) of every query [S]; p is the head sum of [H, S, S], L1-normalised."""
    target = of_heads.sum(0)
    target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)
    some = seen.any(dim=-1, keepdim=True)
    logits = scores.masked_fill(~seen & some, -torch.inf)
    log_predicted = torch.log_softmax(logits, dim=-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(target, target) - target * log_predicted).sum(-1)


@dataclass(frozen=True)
class OracleDSAResult:
    """Results of a whole batch or pack.

    Attributes:
        output: [R, hidden].
        loss: The indexer's, or 0.
        chosen: Of every sequence, bool [S, S].
        input_grad: [R, hidden].
        weight_grads: Every weight's gradient by name.
    """

    output: Tensor
    loss: Tensor
    chosen: list[Tensor]
    input_grad: Tensor = field(default_factory=lambda: torch.zeros(0))
    weight_grads: dict[str, Tensor] = field(default_factory=dict)


def forward(
    dsa: OracleDSA,
    w: dict[str, Tensor],
    x: Tensor,
    sequences: Sequence[TokenSequence],
    *,
    table: Table | None = None,
    loss: OracleLoss | None = None,
    dense: bool = False,
    chosen: Sequence[Tensor] | None = None,
) -> OracleDSAResult:
    """The layer on rows ``x`` [R, hidden]; rows outside every sequence give zero.

    Args:
        dsa: The layer.
        w: Its weights; those of the indexer are not read where ``chosen`` is given without a loss.
        x: Hidden states.
        sequences: Where the tokens of each sequence are, and what they see.
        table: Cosines and sines; None computes them in float64.
        loss: None for none.
        dense: Whether the attention is over all visible keys (the warm-up).
        chosen: The selection of an earlier layer, which this layer shares; None selects.
    """
    mla = dsa.mla
    if table is None:
        table = mla.rotary_table(max((len(s.rows) for s in sequences), default=0))
    output, selections, divergences = torch.zeros_like(x), [], []
    for number, sequence in enumerate(sequences):
        rows = x[sequence.rows]
        scores = None
        if chosen is None or loss is not None:
            detached = rows.detach()
            latent = query_latent(mla, w, rows).detach()
            scores = index_scores(dsa, *index_vectors(dsa, w, detached, latent, table))
        selection = chosen[number] if chosen is not None else None
        if selection is None:
            selection = select(scores.detach(), sequence.visible, dsa.topk)
        selections.append(selection)
        logits, value = scores_and_values(mla, w, rows, table)
        seen = sequence.visible if dense else selection
        sinks = w.get("sinks")
        weights = probabilities(logits, seen, sinks).to(value.dtype)
        heads = torch.einsum("hij,jhv->ihv", weights, value)
        output = output.index_copy(0, sequence.rows, layer_output(mla, w, rows, heads))
        if loss is not None:
            support = selection if loss.sparse else sequence.visible
            target = probabilities(logits, support, sinks).detach()
            divergences.append(kl_of_rows(target, scores, support))
    total = x.new_zeros(())
    if loss is not None:
        of_rows = torch.cat(divergences)
        total = loss.coefficient * (of_rows.sum() if loss.per_token else of_rows.mean())
    return OracleDSAResult(output, total, selections)


def evaluate(
    dsa: OracleDSA,
    w: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    sequences: Sequence[TokenSequence],
    **how,
) -> OracleDSAResult:
    """:func:`forward` in float64, and the gradients of ``output . output_grad + loss``."""
    leaves = {name: t.double().clone().requires_grad_() for name, t in w.items()}
    x = x.double().clone().requires_grad_()
    found = forward(dsa, leaves, x, sequences, **how)
    scalar = (found.output * output_grad.double()).sum() + found.loss
    grads = torch.autograd.grad(
        scalar, [x, *leaves.values()], allow_unused=True, materialize_grads=True
    )
    named = dict(zip(leaves, grads[1:], strict=True))
    return OracleDSAResult(
        found.output.detach(), found.loss.detach(), found.chosen, grads[0], named
    )
