"""An attention backend as one differentiable function, and operands for it."""

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from tests.support import world
from tests.support.spans import KEYS, QUERIES

HEADS = 3
NARROW = {"nope": 16, "rope": 8, "v": 16}
V3 = {"nope": 128, "rope": 64, "v": 128}


def operands(dtype: torch.dtype, batch: int = 2, widths: dict[str, int] = NARROW) -> list[Tensor]:
    """Leaves q_content, q_rope, k_content, k_rope and value, on the axes of ``spans.SPANS``."""
    generator = torch.Generator().manual_seed(0)
    q, k = (QUERIES, batch), (KEYS, batch)
    shapes = [(*q, HEADS, widths["nope"]), (*q, HEADS, widths["rope"])]
    shapes += [(*k, HEADS, widths["nope"]), (*k, widths["rope"]), (*k, HEADS, widths["v"])]
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


def outcome(
    backend: AttentionBackend, leaves: list[Tensor], rules: ScoreRules, lse_weight: float = 0.0
) -> dict[str, Tensor]:
    """Output, LSE and gradients by name; with a weight, the LSE has a gradient too."""
    out, lse = attention(*leaves, rules, backend)
    unseen = lse == -torch.inf
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)).sum()
    if lse_weight:
        loss = loss + lse_weight * lse.masked_fill(unseen, 0).sum()
    grads = torch.autograd.grad(loss, leaves)
    finite = lse.masked_fill(unseen, -1e9)
    return dict(zip(("out", "lse", "dqc", "dqr", "dkc", "dkr", "dv"), (out, finite, *grads)))


def attention(
    q_content: Tensor,
    q_rope: Tensor,
    k_content: Tensor,
    k_rope: Tensor,
    value: Tensor | None,
    rules: ScoreRules,
    backend: AttentionBackend | None = None,
) -> tuple[Tensor, Tensor]:
    """Output in the dtype of ``q_content``, and LSE. Shapes: see ``AttentionInputs``."""
    operands = (q_content, q_rope, k_content, k_rope, value)
    return _Attention.apply(backend or ReferenceBackend(), rules, *operands)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, backend, rules, *operands):
        out, lse = backend.forward(AttentionInputs(*operands), rules)
        out = out.to(operands[0].dtype)
        ctx.call = (backend, rules)
        # Without a gradient of the LSE, backends take another code path.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *operands)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        out, lse, *operands = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        backend, rules = ctx.call
        grads = backend.backward(
            OutputGradient(grad_out, grad_lse),
            AttentionOutput(out, lse),
            AttentionInputs(*operands),
            rules,
        )
        return None, None, *(None if x is None else g.to(x.dtype) for x, g in zip(operands, grads))
