"""Writing ``megatron`` and ``absorbed``: distributed checkpoints of Megatron (torch_dist).

torch's ``FileSystemWriter`` writes each file as if by a rank of its own. The save plans, on which
ranks would agree, are made from shapes alone; a tensor is loaded just before it is written.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo, _StoragePrefix
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

from absorbed_mla.checkpoint.names import KV_UP
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import (
    Entry,
    Part,
    PartResult,
    Progress,
    TargetOptions,
    Writer,
    filled,
    tensor_record,
)
from checkpoint_conversion.formats.megatron_folder import inner_name, write_around
from checkpoint_conversion.formats.torch_dist import (
    BACKEND,
    BACKEND_FILE,
    COMMON_FILE,
    COMMON_STATE,
    block_rows,
    describe,
    extra_state_names,
    place_of,
)
from checkpoint_conversion.layouts import (
    laid_out_tensors,
    padded_size,
    target_layout,
    tensor_parallel_rule,
    with_padding,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.transforms import GATED_ROWS

# Megatron's own default of --make-vocab-size-divisible-by.
_VOCAB_MULTIPLE = 128
# The place of each item of a plan in its file: (offset, length) in bytes.
Written = list[tuple[int, int]]


class TorchDistWriter(Writer):
    """Writes a distributed checkpoint; each part is a file, as if written by a rank of its own.

    Args:
        config: The model's dimensions.
        options: Options of the target.
        to: ``"megatron"`` or ``"absorbed"``.

    Raises:
        CheckpointError: Naming each option that the format or the model does not have.
    """

    def __init__(self, config: ModelConfig, options: TargetOptions, to: str = "megatron") -> None:
        self.config, self.options, self.format = config, options, to
        self._layout = target_layout(
            to, options.norms, kv_up=options.kv_up, down=options.down, **(options.layout or {})
        )
        # Megatron numbers layers where moe_layer_freq is a list, as the written args of MoE models.
        self._stacked = options.layers == "stacked" or (
            options.layers is None and not any(config.moe_layers)
        )
        self._vocab_rows = padded_size(config.vocab_size, options.vocab_multiple or 1)
        self._common: dict[str, object] = {}
        self._objects: dict[str, bytes] = {}
        self._plans: dict[str, SavePlan] = {}
        self._refuse_unsupported()

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """See :meth:`Writer.plan`."""
        padded = with_padding(to_megatron(tensors, self.config), self._vocab_rows)
        whole = laid_out_tensors(padded, self._layout, self.config)
        self._common = self._common_state(whole)
        self._objects = self._make_objects(whole)
        limit = min(part_bytes, self.options.max_shard_bytes or part_bytes)
        parts: list[Part] = []
        for group in filled(self._units(whole), limit, _bytes_of):
            entries = tuple(entry for unit, _ in group for entry in unit)
            parts.append(Part(file_name(len(parts)), entries, sum(peak for _, peak in group)))
        _check_dtypes(parts)
        self._plans = {
            part.name: save_plan(rank, self._objects if rank == 0 else {}, part.entries)
            for rank, part in enumerate(parts)
        }
        return parts

    def layout(self) -> dict[str, object]:
        """See :meth:`Writer.layout`."""
        return describe(self._layout, self._stacked, self.options.iteration)

    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """See :meth:`Writer.write_part`."""
        inner = folder / inner_name(self.options.iteration)
        inner.mkdir(parents=True, exist_ok=True)
        plan = self._plans[part.name]
        entries = dict(zip((item.index for item in plan.items[-len(part.entries) :]), part.entries))
        records = []

        def load(index: MetadataIndex) -> Tensor:
            entry = entries[index]
            values = entry.tensor.load(session)
            assert (tuple(values.shape), values.dtype) == (entry.tensor.shape, entry.tensor.dtype)
            records.append(tensor_record(entry.key, values, entry.offset))
            progress(entry.tensor.nbytes)
            return values

        written = write_file(inner, plan, self._objects, load)
        path = inner / part.name
        name = path.relative_to(folder).as_posix()
        return PartResult(part.name, {name: path.stat().st_size}, records, {"written": written})

    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """See :meth:`Writer.finish`."""
        inner = folder / inner_name(self.options.iteration)
        plans = [self._plans[result.name] for result in results]
        write_metadata(inner, plans, [result.storage["written"] for result in results])
        # Megatron-Core 0.18 and earlier look for the common state there.
        torch.save(self._common, inner / COMMON_FILE)
        (inner / BACKEND_FILE).write_text(json.dumps(BACKEND))
        write_around(folder, self.options.iteration, self.config, auxiliary)

    def _units(self, tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[list[Entry], int]]:
        """The blocks of each tensor, which stay in one part, with the memory that they need."""
        for name, tensor in tensors.items():
            rows = self._rows(name, tensor)
            place = place_of(name, self._stacked, self.config)
            whole, ones = (*place.counts, *tensor.shape), len(place.index)
            # A tensor that cannot be read in parts is read once for all of its blocks.
            once = len(rows) > 1 and tensor.part is None
            blocks = (_loaded_once(tensor) if once else tensor).split(rows)
            entries, row = [], 0
            for block in blocks:
                offset = (*place.index, row, *(0 for _ in tensor.shape[1:]))
                row += block.shape[0]
                alone = len(blocks) == 1 and not ones
                entries.append(
                    Entry(
                        place.key,
                        _with_ones(block, ones),
                        None if alone else offset,
                        None if alone else whole,
                    )
                )
            yield entries, tensor.peak if once else sum(block.peak for block in blocks)

    def _rows(self, name: str, tensor: LazyTensor) -> list[int]:
        """Rows of each block of a tensor; K/V up-projections and gated rows may have several."""
        rows = tensor.shape[0]
        if self.format == "absorbed" and name.endswith(KV_UP):
            block = block_rows(self.config)
            return [block] * (rows // block)
        if tensor_parallel_rule(name) is GATED_ROWS:
            return [rows // 2] * 2
        return [rows]

    def _common_state(self, tensors: Mapping[str, LazyTensor]) -> dict[str, object]:
        """The common state: arguments, iteration, and how Megatron names the tensors."""
        largest = max(tensors.values(), key=lambda tensor: tensor.nbytes)
        return {
            "args": self._args(largest.dtype),
            "checkpoint_version": 3.0,
            "iteration": self.options.iteration or 0,
            "num_floating_point_operations_so_far": 0,
            # Megatron derives the names of the tensors that it loads from these.
            "content_metadata": {
                "singleton_local_shards": False,
                "non_homogeneous_layers": not self._stacked,
                "chained_optim_avoid_prefix": True,
            },
        }

    def _make_objects(self, tensors: Mapping[str, LazyTensor]) -> dict[str, bytes]:
        """Objects beside the tensors: the empty states of modules, and the common state."""
        states = extra_state_names(tensors, self._layout.norms, self._stacked, self.config)
        return {**dict.fromkeys(states, serialised(None)), COMMON_STATE: serialised(self._common)}

    def _args(self, dtype: torch.dtype) -> argparse.Namespace:
        """The arguments of a training that would have saved the checkpoint."""
        args = to_megatron_args(self.config, dtype=dtype, padded_vocab_size=self._vocab_rows)
        args.ckpt_format = "torch_dist"
        fused = self._layout.norms == "fused"
        args.transformer_impl = "transformer_engine" if fused else "local"
        args.make_vocab_size_divisible_by = self.options.vocab_multiple or _VOCAB_MULTIPLE
        if self._stacked and any(self.config.moe_layers):
            # With a list, Megatron would look for numbered layers.
            args.moe_layer_freq = 1
        return args

    def _refuse_unsupported(self) -> None:
        options, problems = self.options, []
        if options.fp8 is not None:
            problems.append(f"--fp8 {options.fp8}: Megatron's weights are not quantised")
        if self.format == "absorbed" and options.kv_up != "combined":
            problems.append("--kv-up split: the absorbed model stores them combined")
        if self.format == "absorbed" and options.down != "separate":
            problems.append("--down fused: the absorbed model has separate ones")
        if options.layers == "stacked" and len(set(self.config.moe_layers)) > 1:
            problems.append("--layers stacked: the model has dense and MoE layers")
        if problems:
            raise CheckpointError(f"--to {self.format} cannot do this:", problems)


def _bytes_of(unit: tuple[list[Entry], int]) -> int:
    return sum(entry.tensor.nbytes for entry in unit[0])


def _loaded_once(tensor: LazyTensor) -> LazyTensor:
    """The same tensor, loaded at most once per session."""

    def load(session: ReadSession) -> Tensor:
        return session.open(tensor, lambda: contextlib.nullcontext(tensor.load(session)))

    return LazyTensor(tensor.shape, tensor.dtype, load, tensor.leaves, tensor.peak)


def _with_ones(tensor: LazyTensor, dims: int) -> LazyTensor:
    """The same tensor with ``dims`` leading dims of size 1."""
    shape = ((1,) * dims) + tensor.shape
    return LazyTensor(
        shape,
        tensor.dtype,
        lambda session: tensor.load(session)[(None,) * dims],
        tensor.leaves,
        tensor.peak,
    )


def _check_dtypes(parts: Sequence[Part]) -> None:
    """Refuse layers or experts of different dtypes in one stored tensor."""
    dtypes: dict[str, set[torch.dtype]] = {}
    for part in parts:
        for entry in part.entries:
            dtypes.setdefault(entry.key, set()).add(entry.tensor.dtype)
    problems = [
        f"{key} would be {' and '.join(sorted(map(str, found)))}"
        for key, found in dtypes.items()
        if len(found) > 1
    ]
    if problems:
        raise CheckpointError(
            "Layers or experts that are stored as one tensor differ in dtype; --dtype makes them "
            "the same, --layers numbered keeps layers apart:",
            problems,
        )


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
