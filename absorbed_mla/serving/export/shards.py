"""Shards of a live model's tensors, gathered from their ranks when values are needed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from torch import Tensor

from absorbed_mla.fp8 import dequantized
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.torch_dist_metadata import (
    Overlap,
    Shape,
    TiledTensor,
    tiling,
)
from checkpoint_conversion.lazy_tensor import ReadSession


@dataclass(frozen=True)
class ShardMetadata:
    """Name, shape, dtype and place of one shard, which its rank sends to the others.

    Attributes:
        name: Name of the whole tensor.
        whole: Shape of the whole tensor.
        dtype: Dtype of the tensor.
        offset: Position of the shard in it.
        size: Shape of the shard, with the dims of layers or experts that its tensor lacks.
    """

    name: str
    whole: Shape
    dtype: torch.dtype
    offset: Shape
    size: Shape


@dataclass(frozen=True, eq=False)
class GatheredTensor(TiledTensor):
    """A tensor whose chunks are on the ranks; loading it is collective.

    Attributes:
        device: Of the model.
        owners: Offset of a chunk -> the rank that sends it.
        own: Chunks of this rank and their shapes, by offset; they are the model's memory.
    """

    device: torch.device
    owners: Mapping[Shape, int]
    own: Mapping[Shape, tuple[Tensor, Shape]]

    def load(
        self, overlaps: Sequence[Overlap], session: ReadSession
    ) -> Iterator[tuple[Overlap, Tensor]]:
        """Broadcast the chunks of each rank in one message; copies of the model's memory."""
        of_rank: dict[int, list[Overlap]] = {}
        for overlap in overlaps:
            of_rank.setdefault(self.owners[overlap.chunk], []).append(overlap)
        for rank, group in sorted(of_rank.items()):
            shapes = [tuple(length for _, length in overlap.spans) for overlap in group]
            sizes = [math.prod(shape) for shape in shapes]
            message = self.empty((sum(sizes),))
            parts = [part.view(shape) for part, shape in zip(message.split(sizes), shapes)]
            if rank == dist.get_rank():
                for part, overlap in zip(parts, group):
                    part.copy_(self._own_part(overlap))
            if dist.get_world_size() > 1:
                # As bytes: not every backend knows every dtype.
                dist.broadcast(message.view(torch.uint8), rank)
            yield from zip(group, parts)

    def empty(self, shape: Shape) -> Tensor:
        """See the base class."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _own_part(self, overlap: Overlap) -> Tensor:
        data, size = self.own[overlap.chunk]
        chunk = dequantized(data).view(size)
        for dim, span in enumerate(overlap.spans):
            chunk = chunk.narrow(dim, *span)
        return chunk


def describe(entry: ShardedTensor) -> ShardMetadata:
    """The metadata of a shard."""
    size = (*(1 for _ in range(entry.prepend_axis_num)), *entry.local_shape)
    return ShardMetadata(
        entry.key, tuple(entry.global_shape), entry.dtype, tuple(entry.global_offset), size
    )


def sent_by_this_rank(entry: ShardedTensor) -> bool:
    """Whether a shard is the one copy of its values that a checkpoint would hold."""
    return is_main_replica(entry.replica_id)


def gathered_tensors(
    everything: Sequence[Sequence[ShardMetadata]],
    entries: Sequence[ShardedTensor],
    device: torch.device,
) -> dict[str, GatheredTensor]:
    """The whole tensors of a model by name, put together from the ranks' shards.

    Args:
        everything: For each rank, the shards that it sends.
        entries: The shards that this rank sends.
        device: Of the model.

    Raises:
        CheckpointError: Listing tensors that the shards do not make up, on every rank.
    """
    own: dict[str, dict[Shape, tuple[Tensor, Shape]]] = {}
    for entry in entries:
        shard, data = describe(entry), entry.data
        assert data is not None
        own.setdefault(shard.name, {})[shard.offset] = data.detach(), shard.size
    shards: dict[str, list[tuple[int, ShardMetadata]]] = {}
    for rank, of_rank in enumerate(everything):
        for shard in of_rank:
            shards.setdefault(shard.name, []).append((rank, shard))
    problems: list[str] = []
    result = {}
    for name, found in shards.items():
        kinds = {(shard.whole, shard.dtype) for _, shard in found}
        (whole, dtype), *others = sorted(kinds, key=str)
        grid = tiling(whole, [(shard.offset, shard.size) for _, shard in found])
        if others or grid is None:
            problems.append(f"{name} of shape {whole} is not tiled by its {len(found)} shards")
            continue
        owners = {shard.offset: rank for rank, shard in found}
        result[name] = GatheredTensor(name, whole, dtype, grid, device, owners, own.get(name, {}))
    if problems:
        raise CheckpointError("The ranks do not hold one model:", problems)
    return result
