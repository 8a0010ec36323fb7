"""Distributed-checkpoint entries under the names and shapes that standard MLASelfAttention uses.

On disk there is no absorbed layout: our K and V up-projections are the rows of one
``linear_kv_up_proj.weight``, optimizer states likewise. Each is written as a grid of row blocks, so
any tensor-parallel size, and either attention, can read what the other wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from absorbed_mla.checkpoint.state_dict import COMBINED_KV_UP, EXTRA_STATE, FUSED_NORMS

if TYPE_CHECKING:
    from absorbed_mla.attention import AbsorbedMLASelfAttention


def standard_sharded_state_dict(
    attention: AbsorbedMLASelfAttention, own: dict, prefix: str, sharded_offsets: tuple
) -> dict:
    """Rename and re-shape an attention's sharded state dict to the standard layout.

    The dict keeps our names as its keys, so that what is loaded fits ``load_state_dict``; what the
    checkpoint sees are the names inside the entries. Norms get the names of the backend's standard
    layers: fused for TransformerEngine, separate for local ones.

    Args:
        attention: Owner of the parameters.
        own: What the host's ``sharded_state_dict`` made of them.
        prefix: Prefix of the attention's keys.
        sharded_offsets: Offsets of the enclosing layers, as the host passes them.
    """
    dims = attention.dims
    result = dict(own)
    parts = {
        "linear_k_up_proj": (0, dims.qk_nope_head_dim),
        "linear_v_up_proj": (dims.qk_nope_head_dim, dims.v_head_dim),
    }
    for name, (first_row, head_dim) in parts.items():
        key = f"{prefix}{name}.weight"
        result[key] = _kv_up_factory(
            attention, own[key], prefix + COMBINED_KV_UP, first_row, head_dim, sharded_offsets
        )
    # Standard layers keep one (empty) extra state for the combined up-projection.
    extra = result[prefix + "linear_kv_down_proj" + EXTRA_STATE]
    key = prefix + "linear_kv_up_proj" + EXTRA_STATE
    result[key] = replace(extra, key=key, data=None)
    if not isinstance(attention.linear_proj, RowParallelLinear):
        # TransformerEngine's standard layers have the norms fused, without extra states.
        for ours, fused in FUSED_NORMS.items():
            if prefix + ours in result:
                result[prefix + ours] = replace(result[prefix + ours], key=prefix + fused)
            result.pop(prefix + ours.removesuffix(".weight") + EXTRA_STATE, None)
    return result


def _kv_up_factory(
    attention: AbsorbedMLASelfAttention,
    entry: ShardedTensor,
    key: str,
    first_row: int,
    head_dim: int,
    sharded_offsets: tuple,
) -> ShardedTensorFactory:
    """An entry that scatters a parameter's heads into the combined weight, and gathers them back.

    A factory rather than a copy: the optimizer applies it to its states as well.
    """
    dims = attention.dims
    rows_per_head = dims.qk_nope_head_dim + dims.v_head_dim
    # The largest block that tiles K and V rows of every head on one grid.
    block = math.gcd(dims.qk_nope_head_dim, dims.v_head_dim)
    num_blocks = dims.num_heads * rows_per_head // block
    first_head = attention.pg_collection.tp.rank() * dims.num_heads_per_rank
    axis = len(sharded_offsets)

    def blocks(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        for i, part in enumerate(weight.split(block)):
            head, row = divmod(i * block, head_dim)
            yield ((first_head + head) * rows_per_head + first_row + row) // block, part

    @torch.no_grad()
    def build(key: str, weight: Tensor, replica_id: ReplicaId, flattened_range: slice | None):
        if flattened_range is not None:
            raise ValueError(f"{key}: flattened optimizer states are not supported; got a slice")
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part,
                *sharded_offsets,
                (axis, index, num_blocks),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for index, part in blocks(weight)
        ]

    @torch.no_grad()
    def merge(loaded: list[Tensor]) -> Tensor:
        return torch.cat(loaded)

    return ShardedTensorFactory(key, entry.data, build, merge, replica_id=entry.replica_id)
