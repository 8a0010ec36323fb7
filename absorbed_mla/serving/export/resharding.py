"""``WeightResharding``: weights of a live model into another one that stands in the same ranks."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor, nn

from absorbed_mla.caching import DerivedTables
from absorbed_mla.serving.export.agreement import on_all_ranks
from absorbed_mla.serving.export.live import model_chunks, model_shards
from absorbed_mla.serving.export.shards import (
    OwnShard,
    ShardMetadata,
    describe,
    gathered_tensors,
    own_shards,
)
from absorbed_mla.serving.export.weights import weights_of
from absorbed_mla.serving.weights.buckets import Bucket, buckets_of, fill, num_bytes
from absorbed_mla.serving.weights.transfer import BUCKET_BYTES
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.formats.torch_dist_metadata import Region, Shape

# What a rank tells the others: its shards of the source and of the target, and its bucket_bytes.
_Told = tuple[Sequence[ShardMetadata], Sequence[ShardMetadata], int]
# Of bucket_bytes: by half of it go elements of any dtype.
_SMALLEST = 64
# A rank's shards of a model, by tensor and offset: all copies.
_Shards = Mapping[tuple[str, Shape], list[OwnShard]]


class _Move(NamedTuple):
    """A box of a tensor, by start and size, in a shard of the source and one of the target."""

    name: str
    dtype: torch.dtype
    source: Shape  # offset of the shard
    target: Shape
    start: Shape
    size: Shape

    def memory(self, shards: _Shards, offset: Shape) -> Iterator[Tensor]:
        """The box in every copy that a rank has of a shard."""
        for part in shards[self.name, offset]:
            box = part.memory()
            for dim, (start, at, length) in enumerate(zip(self.start, offset, self.size)):
                if length < part.size[dim]:  # A GPU may wait for the host.
                    box = box.narrow(dim, start - at, length)
            yield box

    def cut(self, most: int) -> Iterator[_Move]:
        """The same in boxes of at most so many bytes."""
        if math.prod(self.size) * self.dtype.itemsize <= most:
            yield self
            return
        dim = max(range(len(self.size)), key=self.size.__getitem__)
        first = self.size[dim] // 2
        for start, length in ((0, first), (first, self.size[dim] - first)):
            box = [*self.start], [*self.size]
            box[0][dim], box[1][dim] = self.start[dim] + start, length
            yield from self._replace(start=tuple(box[0]), size=tuple(box[1])).cut(most)


def _shards(chunks: Sequence[nn.Module], tables: DerivedTables) -> _Shards:
    """This rank's shards of a model, described again where it has other parameters."""
    weights = [*weights_of(chunks)]

    def described() -> _Shards:
        found = collections.defaultdict(list)
        for shard, own in own_shards(model_shards(chunks), weights):
            found[shard.name, shard.offset].append(own)
        return found

    return tables.get(tuple((id(x), x.stride()) for x in weights), described)


class WeightResharding:
    """A plan to copy a live model's weights into another model that stands in the same ranks.

    Their layouts may be any two of TP, PP (virtual, too), EP and DP. A rank receives once what its
    part of the target needs and its part of the source lacks. Collective, as is :meth:`copy`.

    Args:
        source, target: This rank's part of each, as for ``hf_weights``.
        bucket_bytes: Bytes that a rank holds beside the two models, half of them for what it sends
            and half for what it receives. FP8 parameters of the source are dequantised beside them.

    Raises:
        ValueError: On every rank, listing tensors that only one model has, MTP layers of the source
            excepted, or that differ in shape, as with another padding of the vocabulary; if one is
            no model for ``hf_weights``, the target has FP8 parameters, or an option is wrong.
    """

    def __init__(
        self,
        source: nn.Module | Sequence[nn.Module],
        target: nn.Module | Sequence[nn.Module],
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        def held() -> tuple[list, _Told]:
            if bucket_bytes < _SMALLEST:
                raise ValueError(f"bucket_bytes must be at least {_SMALLEST}, got {bucket_bytes}")
            both = [model_chunks(one) for one in (source, target)]
            shards = [*map(model_shards, both)]
            quantised = [shard.key for shard in shards[1] if is_float8tensor(shard.data)]
            raise_problems("target must have no FP8 parameters; it has", quantised)
            # Copies on one rank are one.
            own, wanted = ([*dict.fromkeys(map(describe, one))] for one in shards)
            return both, (own, wanted, bucket_bytes)

        models, told = on_all_ranks(held)
        self._models = [(chunks, DerivedTables(maxsize=1)) for chunks in models]
        self._device = next(x.device for both in models for one in both for x in one.parameters())
        # NCCL connects all ranks at their first collective, and not all may take part in a copy.
        dist.all_reduce(torch.zeros((), device=self._device))
        self._rank, most = dist.get_rank(), min(size for *_, size in told) // 2
        found: dict[tuple[int, int], list[_Move]] = collections.defaultdict(list)
        for sender, receiver, move in _moves(told):
            if self._rank in (sender, receiver):
                found[sender, receiver] += [move] if sender == receiver else move.cut(most)
        self._local = found.pop((self._rank, self._rank), [])
        # By sender and receiver, what goes together.
        self._messages = {ranks: _messages(moves, most) for ranks, moves in found.items()}

    @torch.no_grad()
    def copy(self) -> None:
        """Set every weight of the target to what it is in the source now, in the target's dtype.

        Both models must lie on a device of the process group's backend, and nothing may change or
        read them meanwhile. On GPUs it is queued in the current stream.
        """
        source, target = (_shards(*one) for one in self._models)

        def read(move: _Move) -> Tensor:
            return next(move.memory(source, move.source))

        def write(move: _Move, values: Tensor) -> None:
            for memory in move.memory(target, move.target):
                memory.copy_(values)

        for move in self._local:
            write(move, read(move))
        size = num_bytes([bucket for found in self._messages.values() for bucket, _ in found])
        sent, received = (
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)
        )
        # In step i a rank sends to the i-th one after it, and receives from the i-th before it.
        for i in range(1, dist.get_world_size()):
            to, of = ((self._rank + step) % dist.get_world_size() for step in (i, -i))
            pairs = (
                self._messages.get(ranks, ()) for ranks in ((self._rank, to), (of, self._rank))
            )
            for out, into in itertools.zip_longest(*pairs, fillvalue=_NOTHING):
                fill(sent, out[0], ((move.name, read(move)) for move in out[1]))
                ends = (dist.isend, sent, out[0], to), (dist.irecv, received, into[0], of)
                operations = [
                    dist.P2POp(operation, buffer[: bucket[-1].end], rank)
                    for operation, buffer, bucket, rank in ends
                    if bucket
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                for slot, move in zip(*into):
                    write(move, slot.of(received))


_Message = tuple[Bucket, list[_Move]]
_NOTHING: _Message = ((), [])


def _messages(moves: Sequence[_Move], most: int) -> list[_Message]:
    buckets = buckets_of([(move.name, move.dtype, move.size) for move in moves], most)
    left = iter(moves)
    return [(bucket, [*itertools.islice(left, len(bucket))]) for bucket in buckets]


def _moves(told: Sequence[_Told]) -> Iterator[tuple[int, int, _Move]]:
    """Sender, receiver and box of all that the target's ranks need."""
    holders: dict[tuple[str, Shape], list[int]] = collections.defaultdict(list)
    firsts: list[list[ShardMetadata]] = []
    for rank, (own, _, _) in enumerate(told):
        firsts.append([shard for shard in own if (shard.name, shard.offset) not in holders])
        for shard in own:
            holders[shard.name, shard.offset].append(rank)
    tensors = gathered_tensors(firsts, [], torch.device("cpu"))
    held = {name: tensor.shape for name, tensor in tensors.items()}
    needed = {shard.name: shard.whole for _, wanted, _ in told for shard in wanted}
    raise_problems(
        "target must have the tensors of source, of which only MTP layers may be more:",
        [
            f"{name}: {held.get(name, 'none')} in source, {needed.get(name, 'none')} in target"
            for name in sorted(held.keys() | needed.keys())
            if held.get(name) != needed.get(name)
            and (name in needed or not name.startswith("mtp."))
        ],
    )
    for receiver, (_, wanted, _) in enumerate(told):
        for shard in wanted:
            tensor = tensors[shard.name]
            for overlap in Region(tensor, shard.offset, shard.size, 0).overlaps:
                ranks = holders[shard.name, overlap.chunk]
                # Itself if it can; others take turns, so that no copy serves all of them.
                sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                start = tuple(at + first for at, (first, _) in zip(overlap.chunk, overlap.spans))
                size = tuple(length for _, length in overlap.spans)
                place = overlap.chunk, shard.offset, start, size
                yield sender, receiver, _Move(shard.name, tensor.dtype, *place)
