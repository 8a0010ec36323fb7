"""Linear layers whose results and gradients have the same bits at every tensor-parallel size.

In place of the products and sums of Megatron's ``ColumnParallelLinear``, ``RowParallelLinear`` and
router, while ``parts.fixed.count`` is fixed. Sums over ranks are in fp32 (fp64) and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from absorbed_mla.batch_invariant import collectives, parts, products
from absorbed_mla.batch_invariant.tree import tree_sum
from absorbed_mla.once_differentiable import once_differentiable


@dataclass(frozen=True)
class Share:
    """How ranks share a linear layer.

    Attributes:
        group: The ranks.
        sequence_parallel: Whether a rank's tokens outside of the layer are a part of all.
        is_expert: Whether the sum over ranks is left to Megatron's token dispatcher. The first rank
            then has the whole sum and others have zeros, which change no bit of it.
        stride: Pieces of a rank's columns, 2 for gates and up-projections.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool = False
    is_expert: bool = False
    stride: int = 1

    @property
    def parts(self) -> int:
        """That a rank has."""
        return parts.own(self.group)

    def summed(self, left: Tensor, right: Tensor) -> Tensor:
        """The sum of this rank's parts of ``left`` times ``right``, rounded if no other has any."""
        dtype = left.dtype if self.group.size() == 1 else None
        return parts.summed_product(left, right, self.parts, self.stride, dtype)

    def gather(self, x: Tensor) -> Tensor:
        """All tokens, from this rank's."""
        if not self.sequence_parallel:
            return x
        found = x.new_empty(self.group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous(), group=self.group)
        return found

    def total(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over ranks of ``x`` [tokens, ...]: of this rank's tokens, or of all."""
        if self.sequence_parallel:
            return collectives.reduce_scatter_by_tree(x, self.group).to(dtype)
        if x.numel():
            x = collectives.reduce_by_tree(x, self.group)
        if self.is_expert and self.group.rank():
            return torch.zeros_like(x, dtype=dtype)
        return x.to(dtype)


class _Column(torch.autograd.Function):
    """``x`` [..., inputs] times a weight [this rank's outputs, inputs], transposed."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, share: Share) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.share = share
        x = share.gather(x)
        found = parts.side_by_side(_rows(x), weight.T, share.parts * share.stride)
        return found.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        share, rows = ctx.share, _rows(grad)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = share.summed(rows, weight)
            dx = share.total(dx.view(*grad.shape[:-1], x.shape[-1]), x.dtype)
        if ctx.needs_input_grad[1]:
            dw = products.of_part(rows.T, _rows(share.gather(x)), weight.dtype)
        return dx, dw, None


class _Row(torch.autograd.Function):
    """``x`` [..., this rank's inputs] times a weight [outputs, inputs], summed over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, share: Share) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.share = share
        found = share.summed(_rows(x), weight.T)
        return share.total(found.view(*x.shape[:-1], len(weight)), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        share, dx, dw = ctx.share, None, None
        rows = _rows(share.gather(grad))
        if ctx.needs_input_grad[0]:
            dx = parts.side_by_side(rows, weight, share.parts).view(x.shape)
        if ctx.needs_input_grad[1]:
            dw = parts.side_by_side(rows.T, _rows(x), share.parts)
        return dx, dw, None


class _Duplicated(torch.autograd.Function):
    """``x`` [tokens, ..., inputs] times a weight [outputs, inputs] that every rank has."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return products.of_part(_rows(x), weight.T, x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = products.of_part(_rows(grad), weight, x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            wide = parts.wide(weight.dtype)

            def gradient(tokens: slice) -> Tensor:
                return products.of_part(_rows(grad[tokens]).T, _rows(x[tokens]), wide)

            dw = sum_over_tokens(gradient, len(x), ctx.group).to(weight.dtype)
        return dx, dw, None


def sum_over_tokens(
    summand: Callable[[slice], Tensor], tokens: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The sum of what the tokens of every rank give.

    Args:
        summand: Of a slice of this rank's tokens, in fp32 (fp64).
        tokens: Of this rank.
        group: From ``parts.token_group``.
    """
    total = tree_sum([summand(part) for part in parts.token_slices(tokens, group)])
    return total if group is None else collectives.reduce_by_tree(total, group)


def duplicated_linear(x: Tensor, weight: nn.Parameter, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` [tokens, ..., inputs] times the transposed weight, which every rank has.

    Args:
        dtype: Of the product; None: that of ``x``.
    """
    group, dtype = parts.token_group(weight), dtype or x.dtype
    return _Duplicated.apply(x.to(dtype), weight.to(dtype), group)


def column_linear(layer: Any, input: Tensor, weight: Tensor, **host: Any) -> Tensor:
    """In place of ``ColumnParallelLinear._forward_impl``.

    Args:
        layer: Megatron's.
        input: [..., inputs], this rank's tokens under sequence parallelism.
        weight: [this rank's outputs, inputs].
        host: What else Megatron passes on to its own function.

    Raises:
        ValueError: If the layer leaves the sum of its gradients to others.
    """
    if layer.disable_grad_reduce and layer.tp_group.size() > 1:
        raise ValueError(f"{parts.OPTION} needs disable_grad_reduce=False, got True")
    share = Share(
        layer.tp_group,
        sequence_parallel=host["sequence_parallel"],
        is_expert=layer.explicit_expert_comm,
        stride=getattr(weight, "partition_stride", 1),
    )
    return _Column.apply(input, weight, share)


def row_linear(layer: Any, input_: Tensor) -> tuple[Tensor, None]:
    """In place of ``RowParallelLinear.forward``.

    Args:
        layer: Megatron's, without bias.
        input_: [..., this rank's inputs].

    Returns:
        [..., outputs], and None for the bias.

    Raises:
        ValueError: If the input is not parallel.
    """
    if not layer.input_is_parallel:
        raise ValueError(f"{parts.OPTION} needs input_is_parallel=True, got False")
    share = Share(
        layer.tp_group,
        sequence_parallel=layer.sequence_parallel and not layer.explicit_expert_comm,
        is_expert=layer.explicit_expert_comm,
    )
    return _Row.apply(input_, layer.weight, share), None


def router_linear(x: Tensor, weight: nn.Parameter, bias: None, router_dtype: torch.dtype) -> Tensor:
    """In place of Megatron's ``router_gating_linear``.

    Args:
        x: [tokens, ..., hidden].
        weight: [experts, hidden].
        bias: None, as ``add_bias_linear`` is refused.
        router_dtype: Of the product.
    """
    return duplicated_linear(x, weight, router_dtype)


class _Broadcast(torch.autograd.Function):
    """A scale of every token, for each of this rank's channels."""

    @staticmethod
    def forward(ctx, scale: Tensor, width: int, share: Share) -> Tensor:
        ctx.share, ctx.dtype = share, scale.dtype
        return scale.unsqueeze(-1).expand(*scale.shape, width)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        share, wide = ctx.share, parts.wide(ctx.dtype)
        slices = parts.split(grad, share.parts, -1)
        total = tree_sum([part.contiguous().sum(-1, dtype=wide) for part in slices])
        return share.total(total, ctx.dtype), None, None


@dataclass(frozen=True)
class TokenScale:
    """What an expert's output is multiplied with, as Megatron's ``MLP`` uses it.

    Attributes:
        scale: [tokens].
        layer: The row-parallel layer whose input is scaled.
    """

    scale: Tensor
    layer: Any

    def unsqueeze(self, dim: int) -> Tensor:
        """[tokens, this rank's channels], whose gradient is summed by parts."""
        assert dim == -1
        share = Share(self.layer.tp_group, is_expert=self.layer.explicit_expert_comm)
        return _Broadcast.apply(self.scale, self.layer.input_size_per_partition, share)


def expert_forward(megatrons: Callable) -> Callable:
    """``MLP.forward`` with a :class:`TokenScale` in place of the tensor that experts get."""

    @functools.wraps(megatrons)
    def forward(layer, hidden_states: Tensor, per_token_scale: Tensor | None = None, **more):
        scale = per_token_scale
        if scale is not None:
            scale = TokenScale(scale, layer.linear_fc2)
        return megatrons(layer, hidden_states, scale, **more)

    return forward


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
