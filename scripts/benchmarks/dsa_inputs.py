"""Inputs of sparse attention, what they must give, and how far off a result is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import kit

if TYPE_CHECKING:
    from torch import Tensor

torch: Any = kit.lazy("torch")
WIDTHS = {name: kit.DIMS[name] for name in ("kv-lora-rank", "qk-pos-emb-head-dim")}
# Queries that keep a key's random number.
KEPT = 8


@dataclass(frozen=True)
class Inputs:
    """Query [S_q, 1, N, C + R], keys [S_k, 1, C + R], gradient [S_q, 1, N, C], and a selection."""

    query: Tensor
    kv: Tensor
    grad: Tensor
    chosen: Tensor

    def latent(self, dtype: torch.dtype | None = None) -> Any:
        """For the functions of the package, in ``dtype`` if it is not the tensors' own."""
        from absorbed_mla.dsa.sparse_reference import latent_inputs

        query, kv = (x.to(dtype or x.dtype) for x in (self.query, self.kv))
        content = self.grad.shape[-1]
        # Parts of their own, as the projections of a layer make them.
        parts = (query[..., :content].contiguous(), query[..., content:].contiguous())
        return latent_inputs(*parts, kv)

    def expected(self, work: str, scale: float) -> tuple[Tensor, ...]:
        """Output and LSE in fp32, for ``"backward"`` with the gradients of query and keys.

        Backward begins with the output rounded to the dtype of the inputs.
        """
        from absorbed_mla.core_attention.types import OutputGradient
        from absorbed_mla.dsa.sparse_reference import sparse_backward, sparse_forward

        floats = self.latent(torch.float32)
        output = sparse_forward(floats, self.chosen, scale)
        if work == "forward":
            return tuple(output)
        rounded = output._replace(out=output.out.to(self.grad.dtype).float())
        grad = OutputGradient(self.grad.float(), None)
        return (*output, *whole(sparse_backward(grad, rounded, floats, self.chosen, scale)))


def selection(queries: int, keys: int, topk: int, shared: bool, make: Any) -> Tensor:
    """The keys of largest random numbers, which change with every query or with every eighth."""
    device, kept = make.device, KEPT if shared else 1
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
