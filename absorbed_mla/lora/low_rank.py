"""The two matrices of LoRA beside one linear layer, shared out over ranks as the layer is.

A layer's output is ``W x + scaling B A x``, A [r, inputs] and B [outputs, r]. What a
tensor-parallel rank has of them, and of the r numbers between them:

    the layer           A              B              A x
    duplicated          all of it      all of it      of the rank's tokens
    column-parallel     all of it      its outputs    of all tokens
    row-parallel        its inputs     all of it      summed over ranks
    W_UK and W_UV       all of it      its heads      see ``forms.py``

Where a rank computes with its own tokens only, its gradient is a part, which Megatron's
``finalize_model_grads`` sums over ranks if the parameter has the attribute ``sequence_parallel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from absorbed_mla.batch_invariant import is_enabled, parts
from absorbed_mla.norm import mark_parameter
from absorbed_mla.tensor_parallel import enter_head_parallel

DUPLICATED, COLUMN, ROW, HEADS = "duplicated", "column_parallel", "row_parallel", "heads"
# ``A x``, when it is needed; None if no token has LoRA.
Begun = Callable[[], Tensor | None]
# A product and how many tokens it has -> the product, which may have begun.
BeginProduct = Callable[[Callable[[], Tensor], int], Begun]


@dataclass(frozen=True)
class Sharding:
    """How ranks share a layer.

    Attributes:
        kind: ``"duplicated"``, ``"column_parallel"``, ``"row_parallel"`` or ``"heads"``.
        tp_group: Tensor-parallel group.
        sequence_parallel: Whether ranks divide the tokens outside of the heads.
    """

    kind: str
    tp_group: torch.distributed.ProcessGroup
    sequence_parallel: bool

    def axis(self, factor: str) -> int | None:
        """The axis of ``"lora_A"`` or ``"lora_B"`` that ranks share out; None: each has it all."""
        axes = {"lora_A": {ROW: 1}, "lora_B": {COLUMN: 0, HEADS: 0}}
        return axes[factor].get(self.kind)

    def sums_tokens(self, factor: str) -> bool:
        """Whether a rank's gradient is that of its own tokens."""
        parts = {"lora_A": (DUPLICATED, COLUMN), "lora_B": (DUPLICATED, ROW)}
        return self.sequence_parallel and self.kind in parts[factor]

    def own_part(self, whole: Tensor, factor: str) -> Tensor:
        """This rank's part of a whole matrix."""
        axis = self.axis(factor)
        if axis is None:
            return whole
        return whole.chunk(self.tp_group.size(), axis)[self.tp_group.rank()]

    def whole(self, own: Tensor, factor: str) -> Tensor:
        """The inverse of :meth:`own_part`; collective."""
        axis, size = self.axis(factor), self.tp_group.size()
        if axis is None or size == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(size)]
        torch.distributed.all_gather(parts, own.contiguous(), group=self.tp_group)
        return torch.cat(parts, axis)


class Factor(nn.Module):
    """One of the two matrices; calling it returns the weight.

    A module that is called, because Megatron's overlapped parameter gather waits in the hooks of
    the module that owns a parameter.
    """

    def __init__(self, name: str, weight: Tensor, sharding: Sharding) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        axis = sharding.axis(name)
        set_tensor_model_parallel_attributes(self.weight, axis is not None, axis or 0, 1)
        mark_parameter(self.weight, allreduce=True, sequence_parallel=sharding.sums_tokens(name))

    def forward(self) -> Tensor:
        """The weight."""
        return self.weight


class LowRank(nn.Module):
    """A and B of one layer.

    Initially A is drawn as PEFT draws it, from the default generator and the same for every number
    of ranks, and B is zero.

    Args:
        rank: r.
        scaling: Multiplies B A.
        inputs: Width of the whole layer's input.
        outputs: Of its output.
        like: A parameter of the layer, for device and dtype.
        sharding: How ranks share the layer.
    """

    def __init__(
        self, rank: int, scaling: float, inputs: int, outputs: int, like: Tensor, sharding: Sharding
    ) -> None:
        super().__init__()
        self.rank, self.scaling, self.sharding = rank, scaling, sharding
        # Of several adapters in parity mode: that of every row of A, in fp32 or fp64.
        self.scalings: Tensor | None = None
        # Megatron switches this attribute of modules off while it generates.
        self.sequence_parallel = sharding.sequence_parallel
        # How the product with A is computed; of several adapters: see ``slots.py``.
        self.begin_product: BeginProduct = lambda product, tokens: product
        drawn = torch.empty(rank, inputs)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
        for name, whole in (("lora_A", drawn), ("lora_B", torch.zeros(outputs, rank))):
            own = sharding.own_part(whole, name).to(like.device, like.dtype, copy=True)
            self.add_module(name, Factor(name, own.contiguous(), sharding))

    @property
    def divides_tokens(self) -> bool:
        """Whether ranks divide the tokens that A is multiplied by."""
        return self.sequence_parallel and self.sharding.kind in (DUPLICATED, COLUMN)

    def begin(self, x: Tensor) -> Begun:
        """``scaling A x`` of a layer's input, for :meth:`add_to`."""
        return self.begin_product(lambda: self.scaled(F.linear(x, self.lora_A())), len(x))

    def scaled(self, x: Tensor) -> Tensor:
        """``scaling x``, or x times ``scalings``, rounded once; no kernel where the factor is 1."""
        if self.scalings is not None:
            return (x * self.scalings).to(x.dtype)
        return x if self.scaling == 1 else x * self.scaling

    def add_to(self, out: Tensor, begun: Begun) -> Tensor:
        """``out + scaling B A x``, rounded once; in place without gradient, but in parity mode.

        Args:
            out: [..., outputs], the last dim contiguous.
            begun: Of the layer's input, by :meth:`begin`.
        """
        between = begun()
        if between is None:
            return out
        between = self._of_own_outputs(between)
        rows, factors = out.view(-1, out.shape[-1]), (between.flatten(0, -2), self.lora_B().t())
        # Parity mode replaces ``addmm``, not the product in place.
        if torch.is_grad_enabled() or is_enabled(out.device):
            return torch.addmm(rows, *factors).view_as(out)
        rows.addmm_(*factors)
        return out

    def _of_own_outputs(self, between: Tensor) -> Tensor:
        """``A x`` of the tokens that this rank's B is multiplied by."""
        kind, group = self.sharding.kind, self.sharding.tp_group
        if kind == COLUMN:
            return enter_head_parallel(between, group, self.sequence_parallel)
        if kind != ROW:
            return between
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(between, group=group)
        return reduce_from_tensor_model_parallel_region(between, group=group)

    def of_heads(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """A [r, C] and scaled B [N, head_dim, r] of W_UK or W_UV, whose products are elsewhere.

        Every rank uses all of A for its own heads: backward sums A's gradient over ranks.
        """
        a = copy_to_tensor_model_parallel_region(self.lora_A(), group=self.sharding.tp_group)
        b = self.lora_B()
        return a, self.scaled(b.view(-1, head_dim, b.shape[1]))

    @torch.no_grad()
    def update(self) -> Tensor:
        """This rank's part of ``scaling B A``, in fp32 or fp64: what merging adds to the weight."""
        wide = parts.wide(self.lora_A.weight.dtype)
        return self.scaling * self.lora_B.weight.to(wide) @ self.lora_A.weight.to(wide)
