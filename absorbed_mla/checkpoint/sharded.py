"""Distributed-checkpoint entries under the names and shapes that standard MLASelfAttention uses.

Distributed checkpoints have no layout of our own: the K and V up-projections are the rows of one
``linear_kv_up_proj.weight``, and so are their optimizer states. Each is written as a grid of row
blocks, so that any tensor-parallel size, and either attention, can read what the other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from absorbed_mla.checkpoint.names import ATTENTION, EXTRA_STATE, KV_UP
from absorbed_mla.dims import MLADims
from absorbed_mla.registry import CHECKPOINT_LAYOUTS


def standard_sharded_state_dict(
    own: dict,
    prefix: str,
    sharded_offsets: tuple,
    *,
    dims: MLADims,
    tp_rank: int,
    fused_norms: bool,
) -> dict:
    """Rename and re-shape an attention's sharded state dict to the standard layout.

    The dict keeps our names as its keys, so that what is loaded fits ``load_state_dict``; what the
    checkpoint sees are the names inside the entries.

    Args:
        own: What Megatron's ``sharded_state_dict`` made of the attention's parameters.
        prefix: Prefix of the attention's keys.
        sharded_offsets: Offsets of the enclosing layers, as Megatron passes them.
        dims: Dimensions of the attention.
        tp_rank: Rank in the attention's tensor-parallel group.
        fused_norms: Whether the backend's standard layers have their norms fused into the linear
            layers (TransformerEngine); those fused norms have no extra states.

    Raises:
        ValueError: If an adapter wraps ``linear_k_up_proj`` or ``linear_v_up_proj``.
    """
    result = dict(own)
    combined = prefix + KV_UP.removeprefix(ATTENTION)
    parts = {
        "linear_k_up_proj": (0, dims.qk_nope_head_dim),
        "linear_v_up_proj": (dims.qk_nope_head_dim, dims.v_head_dim),
    }
    for name, (first_row, head_dim) in parts.items():
        key = f"{prefix}{name}.weight"
        if key not in own:
            raise ValueError(
                f"{prefix}{name} has no weight of its own (is it wrapped by an adapter?): the "
                "attention multiplies by that weight itself, so only other layers can be wrapped"
            )
        result[key] = _kv_up_factory(
            own[key], combined, first_row, head_dim, sharded_offsets, dims=dims, tp_rank=tp_rank
        )
    _separate_down_projections(result, prefix, sharded_offsets, dims=dims, tp_rank=tp_rank)
    # Standard layers keep one (empty) extra state for the combined up-projection.
    key = prefix + "linear_kv_up_proj" + EXTRA_STATE
    result[key] = replace(_any_extra_state(result, prefix), key=key, data=None)
    if fused_norms:
        for rename in CHECKPOINT_LAYOUTS["fused_norms"].renames:
            ours = prefix + rename.default.removeprefix(ATTENTION)
            if ours in result:
                fused = prefix + rename.name.removeprefix(ATTENTION)
                result[ours] = replace(result[ours], key=fused)
            result.pop(ours.removesuffix(".weight") + EXTRA_STATE, None)
    return result


def _any_extra_state(entries: dict, prefix: str) -> ShardedObject:
    """That of a linear layer, which all have alike; a wrapped one has it under another name."""
    return next(
        entry
        for key, entry in entries.items()
        if key.startswith(prefix + "linear_") and key.endswith(EXTRA_STATE)
    )


def _separate_down_projections(
    entries: dict, prefix: str, sharded_offsets: tuple, *, dims: MLADims, tp_rank: int
) -> None:
    """Write a fused down-projection as two, in place, as Megatron's own fused layer does."""
    [stack] = CHECKPOINT_LAYOUTS["fused_down"].joined
    whole, *parts = (
        name.removeprefix(ATTENTION).removesuffix(".weight") for name in (stack.whole, *stack.parts)
    )
    key = f"{prefix}{whole}.weight"
    if key not in entries:
        return
    shards = sum(stack.rows(dims)) // entries[key].data.shape[0]
    # Part of each of the two if the layer is column-parallel.
    rows = [count // shards for count in stack.rows(dims)]
    offset = [(len(sharded_offsets), tp_rank, shards)] if shards > 1 else []

    def pieces(key: str, weight: Tensor) -> Iterator[_Piece]:
        for name, part in zip(parts, weight.split(rows)):
            yield key.replace(whole, name), offset, part

    entries[key] = _factory(key, entries[key], pieces, sharded_offsets)
    extra = entries.pop(prefix + whole + EXTRA_STATE)
    for name in parts:
        own = prefix + name + EXTRA_STATE
        entries[own] = replace(extra, key=own)


def _kv_up_factory(
    entry: ShardedTensor,
    key: str,
    first_row: int,
    head_dim: int,
    sharded_offsets: tuple,
    *,
    dims: MLADims,
    tp_rank: int,
) -> ShardedTensorFactory:
    """An entry that scatters a parameter's heads into the combined weight, and back."""
    rows_per_head = dims.qk_nope_head_dim + dims.v_head_dim
    # The largest block that tiles K and V rows of every head on one grid.
    block = math.gcd(dims.qk_nope_head_dim, dims.v_head_dim)
    num_blocks = dims.num_heads * rows_per_head // block
    first_head = tp_rank * dims.num_heads_per_rank
    axis = len(sharded_offsets)

    def blocks(key: str, weight: Tensor) -> Iterator[_Piece]:
        for i, part in enumerate(weight.split(block)):
            head, row = divmod(i * block, head_dim)
            index = ((first_head + head) * rows_per_head + first_row + row) // block
            yield key, [(axis, index, num_blocks)], part

    return _factory(key, entry, blocks, sharded_offsets)


# Name of the tensor in the checkpoint, its place there as an offset along an axis, and its rows.
_Piece = tuple[str, list[tuple[int, int, int]], Tensor]


def _factory(
    key: str,
    entry: ShardedTensor,
    pieces: Callable[[str, Tensor], Iterator[_Piece]],
    sharded_offsets: tuple,
) -> ShardedTensorFactory:
    """An entry that a checkpoint has as pieces, which are its rows in order.

    A factory rather than a copy: the optimizer applies it to its states as well.
    """

    @torch.no_grad()
    def build(key: str, weight: Tensor, replica_id: ReplicaId, flattened_range: slice | None):
        if flattened_range is not None:
            raise ValueError(f"{key}: flattened optimizer states are not supported; got a slice")
        return [
            ShardedTensor.from_rank_offsets(
                name,
                part,
                *sharded_offsets,
                *offset,
                replica_id=replica_id,
                prepend_axis_num=len(sharded_offsets),
            )
            for name, offset, part in pieces(key, weight)
        ]

    @torch.no_grad()
    def merge(loaded: list[Tensor]) -> Tensor:
        return torch.cat(loaded)

    return ShardedTensorFactory(key, entry.data, build, merge, replica_id=entry.replica_id)
