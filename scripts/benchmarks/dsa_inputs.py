"""Inputs of sparse attention, what they must give, and how far off a result is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Queries that keep a key's random number.
KEPT = 8


@dataclass(frozen=True)
class Inputs:
    """Query [S_q, 1, N, C + R], keys [S_k, 1, C + R], gradient [S_q, 1, N, C], and a selection."""

    query: Tensor
    kv: Tensor
    grad: Tensor
    chosen: Tensor

    def latent(self, content: int, dtype: type | None = None) -> Any:
        """For the functions of the package, in fp32 if ``dtype`` is float."""
        from absorbed_mla.dsa.sparse_reference import latent_inputs

        query, kv = (x.float() if dtype is float else x for x in (self.query, self.kv))
        # Parts of their own, as the projections of a layer make them.
        parts = (query[..., :content].contiguous(), query[..., content:].contiguous())
        return latent_inputs(*parts, kv)


def selection(queries: int, keys: int, topk: int, shared: bool, make: Any) -> Tensor:
    """The keys of largest random numbers, which change with every query or with every eighth."""
    import torch

    device = make.device
    kept = KEPT if shared else 1
    number = torch.rand(queries // kept + 2, keys, device=device, generator=make)
    phase = torch.randint(kept, (keys,), device=device, generator=make)
    found = torch.empty(queries, 1, topk, dtype=torch.int32, device=device)
    for first in range(0, queries, 512):
        row = torch.arange(first, min(first + 512, queries), device=device)
        own = number.gather(0, (row[:, None] + phase) // kept)
        found[first : first + 512, 0] = own.topk(topk).indices.sort().values.int()
    return found


def whole(found: Any) -> tuple[Tensor, Tensor]:
    """Gradients of whole queries and keys."""
    import torch

    query = torch.cat((found.q_content, found.q_rope), -1)
    return query, torch.cat((found.k_content.squeeze(2), found.k_rope), -1)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of ||found - expected|| / ||expected||."""
    pairs = zip(found, expected)
    return max(float((f.float() - e).norm() / e.norm()) for f, e in pairs)


def union(chosen: Tensor) -> float:
    """Keys of four neighbours over those of one, of the first queries."""
    groups = chosen[: len(chosen) // 4 * 4, 0][:128]
    sizes = [len(group.unique()) for group in groups.flatten().split(4 * groups.shape[1])]
    return sum(sizes) / len(sizes) / groups.shape[1]


def expected(
    work: str, inputs: Inputs, content: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Output and LSE, or for ``"backward"`` these with the gradients of query and keys, in fp32.

    Args:
        work: "forward" or "backward".
        inputs: Of the attention.
        content: ``kv_lora_rank``.
        scale: Multiplies the scores.
        dtype: That the output is rounded to before backward.
    """
    from absorbed_mla.core_attention.types import OutputGradient
    from absorbed_mla.dsa.sparse_reference import sparse_backward, sparse_forward

    floats = inputs.latent(content, float)
    output = sparse_forward(floats, inputs.chosen, scale)
    if work == "forward":
        return tuple(output)
    rounded = output._replace(out=output.out.to(dtype).float())
    grad = OutputGradient(inputs.grad.float(), None)
    return (*output, *whole(sparse_backward(grad, rounded, floats, inputs.chosen, scale)))
