"""Writing Hugging Face checkpoints: shards, index, config.json and auxiliary files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import CONFIG, INDEX, SUFFIX
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
from checkpoint_conversion.formats.hugging_face import is_auxiliary, layout_of
from checkpoint_conversion.formats.safetensors_file import write_tensors
from checkpoint_conversion.fp8 import (
    SCALE_FORMATS,
    SCALE_SUFFIX,
    QuantisedTensor,
    is_quantised,
    quantised,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import (
    check_complete,
    hugging_face_shapes,
    stacked,
    stacks_experts,
)
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.target_folder import sync_path

_POSSIBLE = ("dtype", "fp8", "max_shard_bytes")
# Upper bound on what a tensor adds to the header of its file, beside its name.
_HEADER_BYTES = 160


class HuggingFaceWriter(Writer):
    """Writes sharded safetensors with an index; each part is a shard.

    Args:
        config: The model's dimensions.
        options: ``dtype``, ``fp8`` and ``max_shard_bytes``; all others must have their defaults.
        format: Name of the format, ``"hf"``.

    Raises:
        CheckpointError: Naming every option that only other formats have.
    """

    def __init__(self, config: ModelConfig, options: TargetOptions, format: str = "hf") -> None:
        _check_options(options)
        if options.fp8 and stacks_experts(config):
            raise CheckpointError(
                f"--fp8 {options.fp8}: {config.model_type} stores its experts as one tensor, which "
                "DeepSeek's FP8 has no place for"
            )
        self.config, self.options, self.format = config, options, format
        self._parts: list[Part] = []
        self._quantised: dict[str, QuantisedTensor] = {}

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """Fill shards with the tensors in the order of the model; see the base class."""
        shapes = hugging_face_shapes(self.config)
        check_complete(tensors, shapes, "The tensors to write")
        written = stacked({name: tensors[name] for name in shapes}, self.config)
        self.config = self._written_config(written)
        limit = min(part_bytes, self.options.max_shard_bytes or part_bytes)
        units = (self._entries(name, tensor) for name, tensor in written.items())
        groups = list(filled(units, limit, _bytes_in_file))
        self._parts = []
        for i, group in enumerate(groups, 1):
            shard = tuple(entry for unit in group for entry in unit)
            name = f"model-{i:05d}-of-{len(groups):05d}{SUFFIX}"
            self._parts.append(Part(name, shard, _peak(shard)))
        return self._parts

    def layout(self) -> dict[str, object]:
        """See :meth:`Writer.layout`."""
        stored = [entry.tensor for part in self._parts for entry in part.entries]
        return layout_of(stored, len(self._parts), self.config.fp8_scales)

    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """Write one shard; see the base class."""
        values: dict[str, Tensor] = {}
        places = set()
        for entry in part.entries:
            tensor = entry.tensor.load(session).contiguous()
            assert (tuple(tensor.shape), tensor.dtype) == (entry.tensor.shape, entry.tensor.dtype)
            # safetensors refuses tensors that share memory, such as a tied embedding.
            values[entry.key] = tensor.clone() if tensor.data_ptr() in places else tensor
            places.add(tensor.data_ptr())
        records = [self._record(key, tensor, session) for key, tensor in values.items()]
        size = write_tensors(values, folder / part.name)
        for tensor in values.values():
            progress(tensor.nbytes)
        total = sum(tensor.nbytes for tensor in values.values())
        return PartResult(part.name, {part.name: size}, records, {"bytes": total})

    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """Write index and config.json, and copy the rest; see the base class."""
        weight_map = {record["key"]: result.name for result in results for record in result.tensors}
        total = sum(result.storage["bytes"] for result in results)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_json(folder / CONFIG, self.config.hugging_face)
        for name, source in auxiliary.items():
            if name != CONFIG and is_auxiliary(name):
                shutil.copyfile(source, folder / name)
                sync_path(folder / name)

    def _written_config(self, tensors: Mapping[str, LazyTensor]) -> ModelConfig:
        """config.json for the dtype, quantisation and MTP layers that are written."""
        nbytes: Counter[torch.dtype] = Counter()
        for tensor in tensors.values():
            nbytes[tensor.dtype] += tensor.nbytes
        ((dtype, _),) = nbytes.most_common(1)
        config = self.config.without_quantisation().with_mtp_layers(self.config.mtp_layers)
        if dtype != config.dtype:
            config = config.with_dtype(dtype)
        return config.with_quantisation(self.options.fp8) if self.options.fp8 else config

    def _entries(self, name: str, tensor: LazyTensor) -> tuple[Entry, ...]:
        """Entries that stay in one shard: a tensor, or an FP8 weight and its scales."""
        if not self.options.fp8 or not is_quantised(name):
            return (Entry(name, tensor),)
        result = self._quantised[name] = quantised(tensor, self.options.fp8)
        return Entry(name, result.weight), Entry(name + SCALE_SUFFIX, result.scale_inv)

    def _record(self, key: str, tensor: Tensor, session: ReadSession) -> dict:
        record = tensor_record(key, tensor)
        if key in self._quantised:
            record["fp8_error"] = dataclasses.asdict(self._quantised[key].error(session))
        return record


def _check_options(options: TargetOptions) -> None:
    problems = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _POSSIBLE and value != field.default:
            problems.append(f"{field.name} {value}: only Megatron's formats have it")
    if options.fp8 not in (None, *SCALE_FORMATS):
        problems.append(f"fp8 {options.fp8}: must be one of {', '.join(SCALE_FORMATS)}")
    if options.max_shard_bytes is not None and options.max_shard_bytes < 1:
        problems.append(f"max_shard_bytes {options.max_shard_bytes}: must be at least 1")
    if problems:
        raise CheckpointError("A Hugging Face checkpoint cannot be written with:", problems)


def _bytes_in_file(entries: Sequence[Entry]) -> int:
    return sum(entry.tensor.nbytes + len(entry.key) + _HEADER_BYTES for entry in entries)


def _peak(shard: Sequence[Entry]) -> int:
    """Bytes of resident memory needed while a shard is written."""
    tensors = [entry.tensor for entry in shard]
    # A tensor that occurs twice is copied.
    once = {id(tensor) for tensor in tensors}
    copies = len(tensors) - len(once)
    largest = max(tensor.nbytes for tensor in tensors)
    return sum(tensor.peak for tensor in tensors) + copies * largest


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
    sync_path(path)
