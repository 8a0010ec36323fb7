"""Hugging Face checkpoints: config.json beside safetensors files, one or with an index."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import (
    CONFIG,
    INDEX,
    MANIFEST,
    MAX_CONFIG_BYTES,
    SUFFIX,
    file_inside,
    files_inside,
    read_json,
    shown_name,
)
from checkpoint_conversion.config_fields import dtype_name, shown
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.expert_stacks import stacked, unstacked
from checkpoint_conversion.formats.base import (
    Checkpoint,
    Entry,
    Part,
    PartResult,
    Progress,
    TargetOptions,
    Writer,
    filled,
)
from checkpoint_conversion.formats.safetensors_file import read_header, write_tensors
from checkpoint_conversion.fp8 import (
    FP8,
    SCALE_FORMATS,
    SCALE_SUFFIX,
    QuantisedTensor,
    dequantised,
    pair_problems,
    quantised,
)
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.manifest import TensorRecord, tensor_record
from checkpoint_conversion.mapping import (
    absent_as_zeros,
    check_complete,
    count_mtp_layers,
    hugging_face_shapes,
    rows_by_name,
    unread_norms,
    without_tied_head,
)
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.model_type import find_model_type, text_names
from checkpoint_conversion.packed import PACKINGS, PackedWeight, packed_weights, unpacked
from checkpoint_conversion.progress import format_bytes
from checkpoint_conversion.source import Source
from checkpoint_conversion.target_folder import sync_path

SINGLE = f"model{SUFFIX}"
# Suffixes of weights in formats that are not read.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
# Rotary frequencies in some older checkpoints; they follow from config.json.
_BUFFER = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")
# Begins the name of a file with the weights of a PEFT adapter.
_ADAPTER = "adapter_model."
_POSSIBLE = ("dtype", "fp8", "quantised_like", "max_shard_bytes")
# Upper bound on what a tensor adds to the header of its file, beside its name.
_HEADER_BYTES = 160


class HuggingFaceCheckpoint(Checkpoint):
    """A Hugging Face folder, opened by reading config.json, the index and the files' headers.

    Of the further fields of :class:`Source` only links matter.

    Raises:
        CheckpointError: Listing every file that cannot be read, and every contradiction between
            index and files.
    """

    format = "hf"

    def __init__(self, path: Path, **how: Any) -> None:
        self.path = self.auxiliary_folder = path
        follow_links = Source(path, **how).follow_links
        files = files_inside(path, follow_links=follow_links)
        if CONFIG not in files:
            raise CheckpointError(f"{path} has no {CONFIG}, which says what model it holds")
        adapters = [name for name in files if name.startswith(_ADAPTER)]
        if adapters:
            raise CheckpointError(
                f"{path} has a PEFT adapter ({adapters[0]}) beside the weights, which would be "
                "lost: merge it into them (PEFT: merge_and_unload()), or take it out of the folder"
            )
        fields = read_json(files[CONFIG], MAX_CONFIG_BYTES)
        config = ModelConfig.from_hugging_face(fields)
        tensors, shards = _read_shards(path, files, follow_links)
        names = text_names(find_model_type(fields.get("model_type")), tensors)
        images = [name for name, own in names.items() if own is None]
        buffers = [name for name, own in names.items() if own and _BUFFER.fullmatch(own)]
        norms = unread_norms(config)
        unread = [name for name, own in names.items() if own in norms]
        others = (*buffers, *images, *unread)
        self.left_alone = {name: tensors.pop(name).nbytes for name in others}
        self.stored = tensors
        self._names = {name: own for name, own in names.items() if name in tensors and own}
        mtp_layers = count_mtp_layers(self._names.values(), config)
        self.config = dataclasses.replace(config, mtp_layers=mtp_layers)
        self.auxiliary = {name: file for name, file in files.items() if is_auxiliary(name)}
        self.layout = layout_of(self.stored.values(), shards, config.quantisation)
        self.notes = list(_notes(path, files, config, self))
        if unread:
            self.notes.append(f"left out, as nothing reads them: norms, {', '.join(unread)}")
        self._zeros = absent_as_zeros(self._names.values(), self.config)
        if self._zeros:
            names = ", ".join(config.model.may_be_missing)
            self.notes.append(f"zeros, as the files have none: {names}")
        if images:
            size = format_bytes(sum(self.left_alone[name] for name in images))
            self.notes.append(
                f"only the text model is read; {len(images)} tensors for images ({size}) are left "
                "out"
            )

    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """Every weight of the model, dequantised; see the base class."""
        problems: list[str] = []
        dtype = dtype or torch.bfloat16
        named = unpacked(unstacked(self._named(), self.config), dtype, problems)
        tensors = _dequantised(named, dtype, problems)
        tensors = without_tied_head({**tensors, **self._zeros}, self.config, problems)
        try:
            check_complete(tensors, hugging_face_shapes(self.config), "The tensors")
        except CheckpointError as error:
            problems += error.problems
        raise_problems(
            f"The tensors in {self.path} do not fit the model; {len(problems)} problems:", problems
        )
        return tensors

    def packed_weights(self) -> dict[str, PackedWeight]:
        """The weights that are stored in four bits, by the names that the text model alone has.

        Raises:
            CheckpointError: Listing what is wrong with them, or that there are none.
        """
        weights = packed_weights(self._named())
        problems = [problem for one in weights.values() for problem in one.problems()]
        if not weights:
            problems.append(f"it holds {self.config.quantisation or 'no quantised weights'}")
        elif self.config.quantisation is None:
            problems.append(f"{CONFIG} has no quantization_config")
        raise_problems(f"{self.path} must hold four-bit weights:", problems)
        return weights

    def _named(self) -> dict[str, LazyTensor]:
        return {self._names[name]: tensor for name, tensor in self.stored.items()}


class HuggingFaceWriter(Writer):
    """Writes sharded safetensors with an index; each part is a shard.

    Args:
        config: The model's dimensions.
        options: ``dtype``, ``fp8``, ``quantised_like`` and ``max_shard_bytes``; all others must
            have their defaults.
        format: Name of the format, ``"hf"``.

    Raises:
        CheckpointError: Naming every option that only other formats have.
    """

    def __init__(self, config: ModelConfig, options: TargetOptions, format: str = "hf") -> None:
        _check_options(options)
        if options.fp8 and config.model.stacks:
            raise CheckpointError(
                f"--fp8 {options.fp8}: {config.model_type} stores its experts as one tensor, which "
                "DeepSeek's FP8 has no place for"
            )
        self.config, self.options, self.format = config, options, format
        rows = rows_by_name(config) if options.fp8 else {}
        self._in_fp8 = {name for name, row in rows.items() if row.fp8}
        self._like: HuggingFaceCheckpoint | None = None
        self._in_four_bits: dict[str, PackedWeight] = {}
        if options.quantised_like is not None:
            self._like = HuggingFaceCheckpoint(options.quantised_like)
            self._in_four_bits = self._like.packed_weights()
        self._parts: list[Part] = []
        self._quantised: dict[str, QuantisedTensor] = {}

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """Fill shards with the tensors in the order of the model; see the base class."""
        shapes = hugging_face_shapes(self.config)
        check_complete(tensors, shapes, "The tensors to write")
        other = [
            f"{name} has shape {weight.shape} there, and {shapes.get(name, 'does not exist')} here"
            for name, weight in self._in_four_bits.items()
            if weight.shape != shapes.get(name)
        ]
        raise_problems(f"--quantised-like {self.options.quantised_like} is another model:", other)
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
        return layout_of(stored, len(self._parts), self.config.quantisation)

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
        records = [self._record(key, tensor, part.name, session) for key, tensor in values.items()]
        size = write_tensors(values, folder / part.name)
        for tensor in values.values():
            progress(tensor.nbytes)
        total = sum(tensor.nbytes for tensor in values.values())
        return PartResult(part.name, {part.name: size}, records, {"bytes": total})

    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """Write index and config.json, and copy the rest; see the base class."""
        weight_map = {record.key: result.name for result in results for record in result.tensors}
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
        if self._like is not None:
            return config.quantised_like(self._like.config.hugging_face["quantization_config"])
        return config.with_quantisation(self.options.fp8) if self.options.fp8 else config

    def _entries(self, name: str, tensor: LazyTensor) -> tuple[Entry, ...]:
        """Entries that stay in one shard: a tensor, or all that is stored of a quantised weight."""
        if name in self._in_fp8:
            result = quantised(tensor, self.options.fp8)
        elif name in self._in_four_bits:
            result = self._in_four_bits[name].rewritten(tensor)
        else:
            return (Entry(name, tensor),)
        entries = tuple(Entry(name + suffix, one) for suffix, one in result.stored.items())
        self._quantised[entries[0].key] = result
        return entries

    def _record(self, key: str, tensor: Tensor, file: str, session: ReadSession) -> TensorRecord:
        error = None
        if key in self._quantised:
            error = dataclasses.asdict(self._quantised[key].error(session))
        return tensor_record(key, tensor, file, fp8_error=error)


def is_auxiliary(name: str) -> bool:
    """Whether a file at the top of a folder belongs to the model beside its weights."""
    return name != MANIFEST and not name.endswith((SUFFIX, ".index.json", *_OTHER_WEIGHTS))


def layout_of(
    tensors: Iterable[LazyTensor], files: int, announced: str | None
) -> dict[str, object]:
    """The entries of :attr:`Checkpoint.layout`; ``announced`` is config.json's quantisation."""
    dtypes = Counter(tensor.dtype for tensor in tensors)
    named = sorted((dtype_name(dtype), count) for dtype, count in dtypes.items())
    held = _quantisation(dtypes)
    return {
        "files": files,
        "dtypes": ", ".join(f"{name} ({count})" for name, count in named),
        "quantisation": announced if announced and announced.split()[0] == held else held or "none",
    }


def _quantisation(dtypes: Container[torch.dtype]) -> str:
    """What weights of these dtypes are quantised to; empty if they are not."""
    kinds = {FP8: "FP8", **{packing.dtype: packing.name for packing in PACKINGS}}
    return next((kind for dtype, kind in kinds.items() if dtype in dtypes), "")


def _dequantised(
    stored: Mapping[str, LazyTensor], dtype: torch.dtype, problems: list[str]
) -> dict[str, LazyTensor]:
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == FP8:
            scale = stored.get(name + SCALE_SUFFIX)
            found = pair_problems(name, tensor, scale)
            problems += found
            if scale is None or found:
                # A placeholder, so that its shape is still checked.
                tensors[name] = tensor.to(dtype)
            else:
                tensors[name] = dequantised(tensor, scale, dtype)
        elif not name.endswith(SCALE_SUFFIX):
            tensors[name] = tensor
        else:
            weight = stored.get(name.removesuffix(SCALE_SUFFIX))
            if weight is None:
                problems.append(f"{name} is the scale of a weight that is missing")
            elif weight.dtype != FP8:
                problems.append(f"{name} is the scale of a weight that is {weight.dtype}, not FP8")
    return tensors


def _read_shards(
    folder: Path, files: Mapping[str, Path], follow_links: bool
) -> tuple[dict[str, LazyTensor], int]:
    """All tensors of all files, and the number of files."""
    problems: list[str] = []
    unnamed = [name for name in files if name.endswith(SUFFIX)]
    if INDEX in files:
        weight_map = _read_index(files[INDEX])
        shards = list(dict.fromkeys(weight_map.values()))
        unnamed = [name for name in unnamed if name not in shards]
        problems += [f"{name} is there, but {INDEX} does not name it" for name in unnamed]
    elif unnamed == [SINGLE]:
        weight_map, shards = None, unnamed
    else:
        raise CheckpointError(
            f"{folder} has neither {SINGLE} alone nor {INDEX}; its files with weights:", unnamed
        )
    headers = {}
    for shard in shards:
        try:
            headers[shard] = read_header(file_inside(folder, shard, follow_links=follow_links))
        except CheckpointError as error:
            problems.append(str(error))
    if weight_map is not None:
        problems += _disagreements(weight_map, headers)
    raise_problems(f"The files in {folder} cannot be read; {len(problems)} problems:", problems)
    return {name: t for header in headers.values() for name, t in header.items()}, len(shards)


def _read_index(path: Path) -> dict[str, str]:
    """The index: tensor -> file name; names are checked when the files are opened."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path} has no object weight_map, from tensors to files")
    problems = [
        f"{shown_name(name)}: {shown(file)} is no file's name"
        for name, file in weight_map.items()
        if not isinstance(file, str)
    ]
    raise_problems(f"weight_map in {path} must hold names of files:", problems)
    return weight_map


def _disagreements(
    weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, LazyTensor]]
) -> list[str]:
    """Contradictions between the index and those files that could be read."""
    problems = []
    for name, shard in weight_map.items():
        if shard in headers and name not in headers[shard]:
            problems.append(f"{INDEX} has {shown_name(name)} in {shard}, which does not hold it")
    for shard, header in headers.items():
        for name in header:
            named = weight_map.get(name)
            if named is None:
                problems.append(f"{name} is in {shard}, but not in {INDEX}")
            elif named != shard:
                problems.append(f"{name} is in {shard}, but {INDEX} has it in {shown_name(named)}")
    return problems


def _notes(
    path: Path, files: Iterable[str], announced: ModelConfig, checkpoint: HuggingFaceCheckpoint
) -> Iterator[str]:
    if announced.mtp_layers != checkpoint.config.mtp_layers:
        yield (
            f"{CONFIG} announces {announced.mtp_layers} MTP layers, the files hold "
            f"{checkpoint.config.mtp_layers}"
        )
    held = _quantisation({tensor.dtype for tensor in checkpoint.stored.values()})
    if held != (announced.quantisation or "").split(" ")[0]:
        yield f"the files hold {held or 'no quantised'} weights, and {CONFIG} says otherwise"
    others = [name for name in files if name.endswith((*_OTHER_WEIGHTS, ".bin.index.json"))]
    if others:
        yield f"left alone, as weights of another format: {', '.join(others)}"
    folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    if folders:
        yield f"left alone, as nothing in folders is read: {', '.join(map(shown_name, folders))}"


def _check_options(options: TargetOptions) -> None:
    problems = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _POSSIBLE and value != field.default:
            problems.append(f"{field.name} {value}: only Megatron's formats have it")
    if options.fp8 and options.quantised_like:
        problems.append(f"fp8 {options.fp8}: not with quantised_like")
    if options.fp8 not in (None, *SCALE_FORMATS):
        problems.append(f"fp8 {options.fp8}: must be one of {', '.join(SCALE_FORMATS)}")
    if options.max_shard_bytes is not None and options.max_shard_bytes < 1:
        problems.append(f"max_shard_bytes {options.max_shard_bytes}: must be at least 1")
    raise_problems("A Hugging Face checkpoint cannot be written with:", problems)


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
