"""Shards of a live model's tensors, gathered from their ranks when values are needed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.fp8_utils import is_float8tensor
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
class OwnChunk:
    """A chunk that this rank has, which shares the model's memory, wherever that is.

    Attributes:
        source: The weight of the model, read where it is by then; or values that are of none.
        size: Shape of the chunk, with the dims of layers or experts that its tensor lacks.
        view: Shape, strides and offset of the chunk in the weight; None: it is no weight's.
    """

    source: Tensor
    size: Shape
    view: tuple[Shape, Shape, int] | None = None

    def values(self) -> Tensor:
        """The chunk."""
        data = self.source.detach()
        if self.view is not None:
            shape, strides, offset = self.view
            data = data.as_strided(shape, strides, data.storage_offset() + offset)
        return dequantized(data).view(self.size)


@dataclass(frozen=True, eq=False)
class GatheredTensor(TiledTensor):
    """A tensor whose chunks are on the ranks; loading it is collective.

    Attributes:
        device: Of the model.
        owners: Offset of a chunk -> the rank that sends it.
        own: Chunks of this rank by offset.
    """

    device: torch.device
    owners: Mapping[Shape, int]
    own: Mapping[Shape, OwnChunk]

    def load(
        self, overlaps: Sequence[Overlap], session: ReadSession
    ) -> Iterator[tuple[Overlap, Tensor]]:
        """Broadcast the chunks of each rank in one message; copies of the model's memory."""
        for rank, group in self._by_owner(overlaps):
            yield from zip(group, self._sent(rank, group))

    def load_into(self, places: Mapping[Overlap, Tensor], session: ReadSession) -> None:
        """See the base class; a model of one rank needs no message."""
        alone = dist.get_world_size() == 1
        for rank, group in self._by_owner([*places]):
            values = self._own(group) if alone else self._sent(rank, group)
            torch._foreach_copy_([places[overlap] for overlap in group], values)

    def empty(self, shape: Shape) -> Tensor:
        """See the base class."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _by_owner(self, overlaps: Sequence[Overlap]) -> list[tuple[int, list[Overlap]]]:
        of_rank: dict[int, list[Overlap]] = {}
        for overlap in overlaps:
            of_rank.setdefault(self.owners[overlap.chunk], []).append(overlap)
        return sorted(of_rank.items())

    def _sent(self, rank: int, overlaps: Sequence[Overlap]) -> list[Tensor]:
        """Parts of chunks of one rank, in its message."""
        shapes = [tuple(length for _, length in overlap.spans) for overlap in overlaps]
        sizes = [math.prod(shape) for shape in shapes]
        message = self.empty((sum(sizes),))
        parts = [part.view(shape) for part, shape in zip(message.split(sizes), shapes)]
        if rank == dist.get_rank():
            torch._foreach_copy_(parts, self._own(overlaps))
        if dist.get_world_size() > 1:
            # As bytes: not every backend knows every dtype.
            dist.broadcast(message.view(torch.uint8), rank)
        return parts

    def _own(self, overlaps: Sequence[Overlap]) -> list[Tensor]:
        return [overlap.of(self.own[overlap.chunk].values()) for overlap in overlaps]


def describe(entry: ShardedTensor) -> ShardMetadata:
    """The metadata of a shard."""
    size = (*(1 for _ in range(entry.prepend_axis_num)), *entry.local_shape)
    return ShardMetadata(
        entry.key, tuple(entry.global_shape), entry.dtype, tuple(entry.global_offset), size
    )


def sent_by_this_rank(entry: ShardedTensor) -> bool:
    """Whether a shard is the one copy of its values that a checkpoint would hold."""
    return is_main_replica(entry.replica_id)


def _chunks_of(weights: Iterable[Tensor]) -> Callable[[ShardedTensor, Shape], OwnChunk]:
    """Makes the chunk of an entry and its size."""
    plain = (one for one in weights if one.numel() and not is_float8tensor(one))
    found = sorted(plain, key=Tensor.data_ptr)
    addresses = [one.data_ptr() for one in found]

    def chunk_of(entry: ShardedTensor, size: Shape) -> OwnChunk:
        data = entry.data
        assert data is not None
        if is_float8tensor(data) or not addresses:
            return OwnChunk(data, size)
        weight = found[bisect.bisect_right(addresses, data.data_ptr()) - 1]
        bytes_before = data.data_ptr() - weight.data_ptr()
        if weight.dtype != data.dtype or not 0 <= bytes_before < weight.nbytes:
            return OwnChunk(data, size)
        view = tuple(data.shape), data.stride(), bytes_before // data.itemsize
        return OwnChunk(weight, size, view)

    return chunk_of


def gathered_tensors(
    everything: Sequence[Sequence[ShardMetadata]],
    entries: Sequence[ShardedTensor],
    device: torch.device,
    weights: Iterable[Tensor] = (),
) -> dict[str, GatheredTensor]:
    """The whole tensors of a model by name, put together from the ranks' shards.

    Args:
        everything: For each rank, the shards that it sends.
        entries: The shards that this rank sends.
        device: Of the model.
        weights: Of this rank's part of the model; shards are read where these are by then.

    Raises:
        CheckpointError: Listing tensors that the shards do not make up, on every rank.
    """
    own: dict[str, dict[Shape, OwnChunk]] = {}
    chunk_of = _chunks_of(weights)
    for entry in entries:
        shard = describe(entry)
        own.setdefault(shard.name, {})[shard.offset] = chunk_of(entry, shard.size)
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
