"""Writer of ``megatron`` and ``absorbed``: Megatron's distributed checkpoints (torch_dist).

Each part is a file of its own, as if a rank had written it: objects and tensors one after the
other, each in ``torch.save``'s format. ``.metadata`` says which tensor is where. torch's own
``FileSystemWriter`` is not used: it wants save plans that all ranks have agreed on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from absorbed_mla.checkpoint.names import KV_UP
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.formats.base import (
    Entry,
    Part,
    PartResult,
    Progress,
    TargetOptions,
    Writer,
    filled,
)
from checkpoint_conversion.formats.megatron_folder import inner_name, write_around
from checkpoint_conversion.formats.torch_dist import (
    BACKEND,
    BACKEND_FILE,
    COMMON_FILE,
    COMMON_STATE,
    METADATA,
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
from checkpoint_conversion.manifest import tensor_record
from checkpoint_conversion.mapping import to_megatron
from checkpoint_conversion.mapping_table import GATED_ROWS
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig

# Megatron's own default of --make-vocab-size-divisible-by.
_VOCAB_MULTIPLE = 128


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
            options.layers is None and not any(config.moe_layers) and not _shares(config)
        )
        self._vocab_rows = padded_size(config.vocab_size, options.vocab_multiple or 1)
        self._common: dict[str, object] = {}
        self._objects: dict[str, bytes] = {}
        self._parts: dict[str, Part] = {}
        self._refuse_unsupported()

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """See :meth:`Writer.plan`."""
        padded = with_padding(to_megatron(tensors, self.config), self._vocab_rows)
        whole = laid_out_tensors(padded, self._layout, self.config)
        self._common = self._common_state(whole)
        # Objects beside the tensors: the empty states of modules, and the common state.
        states = extra_state_names(whole, self._layout.norms, self._stacked, self.config)
        self._objects = dict.fromkeys(states, _serialised(None))
        self._objects[COMMON_STATE] = _serialised(self._common)
        limit = min(part_bytes, self.options.max_shard_bytes or part_bytes)
        parts: list[Part] = []
        for group in filled(self._units(whole), limit, _bytes_of):
            entries = tuple(entry for unit, _ in group for entry in unit)
            parts.append(Part(_file_name(len(parts)), entries, sum(peak for _, peak in group)))
        _check_dtypes(parts)
        self._parts = {part.name: part for part in parts}
        return parts

    def layout(self) -> dict[str, object]:
        """See :meth:`Writer.layout`."""
        return describe(self._layout, self._stacked, self.options.iteration)

    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """See :meth:`Writer.write_part`."""
        path = folder / inner_name(self.options.iteration) / part.name
        name = path.relative_to(folder).as_posix()
        path.parent.mkdir(parents=True, exist_ok=True)
        records, ends = [], []
        with path.open("wb") as file, _without_checksums():
            for content in self._objects_in(part).values():
                file.write(content)
                ends.append(file.tell())
            for entry in part.entries:
                values = entry.tensor.load(session)
                assert (tuple(values.shape), values.dtype) == (
                    entry.tensor.shape,
                    entry.tensor.dtype,
                )
                records.append(tensor_record(entry.key, values, name, entry.offset))
                progress(entry.tensor.nbytes)
                torch.save(_with_own_storage(values), file)
                ends.append(file.tell())
        return PartResult(part.name, {name: path.stat().st_size}, records, {"ends": ends})

    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """See :meth:`Writer.finish`."""
        inner = folder / inner_name(self.options.iteration)
        with (inner / METADATA).open("wb") as file:
            pickle.dump(self._metadata(results), file)
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

    def _objects_in(self, part: Part) -> dict[str, bytes]:
        """Objects beside the tensors, which the first file holds."""
        return self._objects if part.name == _file_name(0) else {}

    def _metadata(self, results: Sequence[PartResult]) -> Metadata:
        """What is stored, and where; results are in the order of the plan."""
        stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for result in results:
            part, ends = self._parts[result.name], result.storage["ends"]
            indices = []
            for name in self._objects_in(part):
                stored[name] = BytesStorageMetadata()
                indices.append(MetadataIndex(name))
            for entry in part.entries:
                offset = torch.Size(entry.offset or (0,) * len(entry.tensor.shape))
                whole = TensorStorageMetadata(
                    TensorProperties(entry.tensor.dtype),
                    torch.Size(entry.whole_shape or entry.tensor.shape),
                    [],
                )
                chunk = ChunkStorageMetadata(offset, torch.Size(entry.tensor.shape))
                stored.setdefault(entry.key, whole).chunks.append(chunk)
                indices.append(MetadataIndex(entry.key, offset))
            for index, start, end in zip(indices, [0, *ends[:-1]], ends, strict=True):
                places[index] = _StorageInfo(part.name, start, end - start)
        # The folder is renamed afterwards, so that its path must not be recorded.
        return Metadata(stored, storage_data=places, storage_meta=StorageMeta())

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
        for option in ("fp8", "quantised_like"):
            value = getattr(options, option)
            if value is not None:
                flag = f"--{option.replace('_', '-')}"
                problems.append(f"{flag} {value}: Megatron's weights are not quantised")
        if self.format == "absorbed" and options.kv_up != "combined":
            problems.append("--kv-up split: the absorbed model stores them combined")
        if self.format == "absorbed" and options.down != "separate":
            problems.append("--down fused: the absorbed model has separate ones")
        if options.layers == "stacked" and len(set(self.config.moe_layers)) > 1:
            problems.append("--layers stacked: the model has dense and MoE layers")
        if options.layers == "stacked" and _shares(self.config):
            problems.append("--layers stacked: the model has layers with and without an indexer")
        raise_problems(f"--to {self.format} cannot do this:", problems)


def _shares(config: ModelConfig) -> bool:
    """Whether some layers have no indexer and share the selection of another."""
    return config.indexer is not None and config.indexer.topk_freq > 1


def _bytes_of(unit: tuple[list[Entry], int]) -> int:
    return sum(entry.tensor.nbytes for entry in unit[0])


def _loaded_once(tensor: LazyTensor) -> LazyTensor:
    """The same tensor, loaded at most once per session."""

    def load(session: ReadSession) -> Tensor:
        return session.once(tensor, lambda: tensor.load(session))

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
    raise_problems(
        "Layers or experts that are stored as one tensor differ in dtype; --dtype makes them "
        "the same, --layers numbered keeps layers apart:",
        problems,
    )


def _file_name(rank: int) -> str:
    return f"__{rank}_0{DEFAULT_SUFFIX}"


def _serialised(value: object) -> bytes:
    """An object as Megatron stores it: a list with the one shard that there is."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()


def _with_own_storage(values: Tensor) -> Tensor:
    """The same values in a storage of their own, because ``torch.save`` writes whole storages."""
    values = values.detach().contiguous()
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    flat = torch.from_numpy(values.flatten().view(torch.uint8).numpy())
    return flat.view(values.dtype).view(values.shape)


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
