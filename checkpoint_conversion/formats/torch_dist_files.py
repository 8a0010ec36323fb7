"""Writing the files of a distributed checkpoint with torch's ``FileSystemWriter``.

Each file is written as if by a rank of its own. The save plans, on which ranks would agree, are
made from shapes alone; a tensor is loaded just before it is written.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from checkpoint_conversion.formats.base import Entry
from checkpoint_conversion.formats.torch_dist import COMMON_FILE

# The place of each item of a plan in its file: (offset, length) in bytes.
Written = list[tuple[int, int]]


def file_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"__{rank}_0{DEFAULT_SUFFIX}"


def save_plan(rank: int, objects: Mapping[str, bytes], entries: Sequence[Entry]) -> SavePlan:
    """The save plan of a rank: its objects, then its tensors, in order.

    Args:
        rank: Number of the rank.
        objects: Serialised objects that are no tensors, by name.
        entries: Tensors and blocks of tensors.
    """
    items = [
        WriteItem(
            MetadataIndex(name), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(content))
        )
        for name, content in objects.items()
    ]
    for entry in entries:
        offset = torch.Size(entry.offset or (0,) * len(entry.tensor.shape))
        data = TensorWriteData(
            ChunkStorageMetadata(offset, torch.Size(entry.tensor.shape)),
            TensorProperties(entry.tensor.dtype),
            torch.Size(entry.whole_shape or entry.tensor.shape),
        )
        index = MetadataIndex(entry.key, offset)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_"))


def write_file(
    folder: Path,
    plan: SavePlan,
    objects: Mapping[str, bytes],
    load: Callable[[MetadataIndex], Tensor],
) -> Written:
    """Write a rank's file.

    Args:
        folder: The checkpoint's folder.
        plan: The rank's :func:`save_plan`.
        objects: The objects that it was made with.
        load: Returns the values of an entry.

    Returns:
        The place of each item in the file, in the order of the plan.
    """

    def resolve(item: WriteItem) -> io.BytesIO | Tensor:
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(objects[item.index.fqn])
        return with_own_storage(load(item.index))

    with _without_checksums():
        results = _Writer(folder).write_data(plan, _JustInTime(resolve)).wait()
    places = {result.index: result.storage_data for result in results}
    return [(places[item.index].offset, places[item.index].length) for item in plan.items]


def write_metadata(folder: Path, plans: Sequence[SavePlan], written: Sequence[Written]) -> None:
    """Write ``.metadata``, which makes the ranks' files a checkpoint.

    Args:
        folder: The checkpoint's folder.
        plans: The save plans of all ranks, in order.
        written: What :func:`write_file` returned for each of them.
    """
    _, metadata = create_default_global_save_plan(list(plans), rewrite_index_hints=False)
    results = [
        [
            WriteResult(item.index, length, _StorageInfo(file_name(rank), offset, length))
            for item, (offset, length) in zip(plan.items, places, strict=True)
        ]
        for rank, (plan, places) in enumerate(zip(plans, written, strict=True))
    ]
    _Writer(folder).finish(metadata, results)


def write_common_file(folder: Path, common: Mapping[str, object]) -> None:
    """Write the common state where Megatron-Core 0.18 and earlier look for it."""
    torch.save(dict(common), folder / COMMON_FILE)


def serialised(value: object) -> bytes:
    """An object as Megatron stores it: a list with the one shard that there is."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def with_own_storage(values: Tensor) -> Tensor:
    """The same values in a storage of their own, because ``torch.save`` writes whole storages."""
    values = values.detach().contiguous()
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    flat = torch.from_numpy(values.flatten().view(torch.uint8).numpy())
    return flat.view(values.dtype).view(values.shape)


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path) -> None:
        # The caller syncs files to disk, in parallel with the writing of others.
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        """Empty: files are renamed afterwards, so their path must not be recorded."""
        return StorageMeta()


class _JustInTime(DefaultSavePlanner):
    def __init__(self, resolve: Callable[[WriteItem], io.BytesIO | Tensor]) -> None:
        super().__init__()
        self._resolve = resolve

    def resolve_data(self, write_item: WriteItem) -> io.BytesIO | Tensor:
        return self._resolve(write_item)


class _ChecksumSetting:
    """Switches off the CRC32 of ``torch.save``, which takes a third of the writing time.

    No reader of distributed checkpoints checks it. The setting is global to the process, or in
    newer releases of torch to the thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._before = torch.serialization.get_crc32_options()
            self._users += 1
            torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                torch.serialization.set_crc32_options(self._before)


_without_checksums = _ChecksumSetting().off
