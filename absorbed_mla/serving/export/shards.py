"""Shards of a live model's tensors, gathered from their ranks when values are needed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
class OwnShard:
    """A shard of this rank in a weight, which may move: its memory is not held.

    Attributes:
        weight: The parameter or buffer; of FP8 the shard.
        size: Shape of the shard, with the dims of layers or experts that its tensor lacks.
        strides, start: Of the shard, from the weight's first element; None: it is all of it.
    """

    weight: Tensor
    size: Shape
    strides: Shape | None = None
    start: int = 0

    def memory(self) -> Tensor:
        """Where it is now; of FP8 the values."""
        data = self.weight.detach()
        if self.strides is None:
            return dequantized(data).view(self.size)
        return data.as_strided(self.size, self.strides, data.storage_offset() + self.start)


@dataclass(frozen=True, eq=False)
class GatheredTensor(TiledTensor):
    """A tensor whose chunks are on the ranks; loading it is collective.

    Attributes:
        device: Of the model.
        owners: Offset of a chunk -> the rank that sends it.
        own: Shards of this rank by offset.
    """

    device: torch.device
    owners: Mapping[Shape, int]
    own: Mapping[Shape, OwnShard]

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
        # Once each: of FP8 it is a copy.
        chunks = {at: self.own[at].memory() for at in {overlap.chunk for overlap in overlaps}}
        return [overlap.of(chunks[overlap.chunk]) for overlap in overlaps]


def describe(entry: ShardedTensor) -> ShardMetadata:
    """The metadata of a shard."""
    size = (*(1 for _ in range(entry.prepend_axis_num)), *entry.local_shape)
    return ShardMetadata(
        entry.key, tuple(entry.global_shape), entry.dtype, tuple(entry.global_offset), size
    )


def sent_by_this_rank(entry: ShardedTensor) -> bool:
    """Whether a shard is the one copy of its values that a checkpoint would hold."""
    return is_main_replica(entry.replica_id)


def own_shards(
    entries: Iterable[ShardedTensor], weights: Iterable[Tensor]
) -> Iterator[tuple[ShardMetadata, OwnShard]]:
    """Where each shard is.

    Args:
        entries: Shards, which share the memory of weights.
        weights: All parameters and buffers of this rank.
    """
    plain = sorted(
        (one for one in weights if not is_float8tensor(one)),
        key=lambda one: (one.data_ptr(), one.numel()),
    )
    addresses = [one.data_ptr() for one in plain]
    for entry in entries:
        shard, data = describe(entry), entry.data
        assert data is not None
        if is_float8tensor(data):
            yield shard, OwnShard(data, shard.size)
            continue
        weight = plain[bisect.bisect(addresses, data.data_ptr()) - 1]
        start = data.data_ptr() - weight.data_ptr()
        assert 0 <= start < weight.nbytes and data.dtype == weight.dtype, f"{entry.key} is a copy"
        strides = data.view(shard.size).stride()
        yield shard, OwnShard(weight, shard.size, strides, start // data.itemsize)


def gathered_tensors(
    everything: Sequence[Sequence[ShardMetadata]],
    held: Iterable[tuple[ShardMetadata, OwnShard]],
    device: torch.device,
) -> dict[str, GatheredTensor]:
    """The whole tensors of a model by name, put together from the ranks' shards.

    Args:
        everything: For each rank, the shards that it sends.
        held: The shards that this rank sends, as :func:`own_shards` gives them.
        device: Of the model.

    Raises:
        CheckpointError: Listing tensors that the shards do not make up, on every rank.
    """
    own: dict[str, dict[Shape, OwnShard]] = {}
    for shard, place in held:
        own.setdefault(shard.name, {})[shard.offset] = place
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
