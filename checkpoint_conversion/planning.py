"""The plan of a conversion, from headers alone, and the fingerprint that ``resume`` checks."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from checkpoint_conversion import __version__
from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.formats import writer_for
from checkpoint_conversion.formats.base import Checkpoint, Entry, Part, TargetOptions, Writer
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import count_parameters, rows_by_name, without_mtp_layers
from checkpoint_conversion.megatron_args import megatron_notes
from checkpoint_conversion.model import ModelConfig

# Target size of a part: 64 MiB, or half of the largest tensor if that is more. Several parts then
# fit into memory together, whatever the checkpoint's size.
_SMALLEST_PART = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """What a conversion will write, decided before it starts.

    Attributes:
        checkpoint: The source.
        writer: The writer of the target.
        parts: The parts of the target, in the order they are written.
        left_out: Stored tensors that the target will not have: name -> reason.
        notes: What a user should know, one line each.
        parameters: Number of the model's weights, each counted once.
        dtypes: Size of the target in bytes, by dtype.
        largest: Size in bytes of the largest tensor of the model or the target.
    """

    checkpoint: Checkpoint
    writer: Writer
    parts: tuple[Part, ...]
    left_out: dict[str, str]
    notes: list[str]
    parameters: int
    dtypes: dict[str, int]
    largest: int

    @property
    def entries(self) -> list[Entry]:
        """The entries of all parts."""
        return [entry for part in self.parts for entry in part.entries]

    @property
    def nbytes(self) -> int:
        """Size of the target's tensors in bytes."""
        return sum(self.dtypes.values())


def plan_conversion(
    checkpoint: Checkpoint, to: str, options: TargetOptions, exclude_mtp: bool = False
) -> ConversionPlan:
    """Plan the conversion of an open checkpoint, perhaps without multi-token-prediction layers.

    Raises:
        CheckpointError: If a tensor is unknown, missing, misshapen or would get lost.
    """
    tensors = checkpoint.hugging_face_tensors(options.dtype)
    _check_all_read(checkpoint.stored, tensors)
    left_out = dict.fromkeys(checkpoint.left_alone, "no weight of the model")
    notes = list(checkpoint.notes)
    if options.dtype is None:
        notes += dtype_notes(checkpoint)
    if {checkpoint.format, to} != {"hf"}:
        notes += megatron_notes(checkpoint.config)
    config = checkpoint.config.without_quantisation()
    if exclude_mtp:
        everything = _leaves(tensors.values())
        tensors, config = _without_mtp(tensors, config, notes)
        excluded = everything - _leaves(tensors.values())
        left_out.update(dict.fromkeys(sorted(excluded), "--exclude-mtp"))
    if options.dtype is not None:
        config = config.with_dtype(options.dtype)
        tensors = _cast(tensors, config, options.dtype)
    largest = max(tensor.nbytes for tensor in tensors.values())
    writer = writer_for(to, config, options)
    parts = writer.plan(tensors, max(_SMALLEST_PART, largest // 2))
    entries = [entry for part in parts for entry in part.entries]
    _check_parts(parts)
    _check_all_written(tensors, entries)
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[dtype_name(entry.tensor.dtype)] += entry.tensor.nbytes
    return ConversionPlan(
        checkpoint=checkpoint,
        writer=writer,
        parts=tuple(parts),
        left_out=left_out,
        notes=notes,
        parameters=count_parameters({name: t.shape for name, t in tensors.items()}, config),
        dtypes=dict(dtypes),
        largest=max(largest, *(entry.tensor.nbytes for entry in entries)),
    )


def dtype_notes(checkpoint: Checkpoint) -> list[str]:
    """A note about tensors in float64, if there are any: no released model has them."""
    wide = [name for name, t in checkpoint.stored.items() if t.dtype == torch.float64]
    announced = checkpoint.config.dtype
    if not wide or announced == torch.float64:
        return []
    model = "" if announced is None else f" in a {dtype_name(announced)} model"
    return [f"{len(wide)} tensors are float64{model} (the first: {wide[0]}); --dtype rounds them"]


def _cast(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """The weights in another dtype, but for those that the table keeps in float32."""
    kept = {name for name, row in rows_by_name(config).items() if row.float32}
    return {name: tensor if name in kept else tensor.to(dtype) for name, tensor in tensors.items()}


def _without_mtp(
    tensors: Mapping[str, LazyTensor], config: ModelConfig, notes: list[str]
) -> tuple[dict[str, LazyTensor], ModelConfig]:
    if not config.mtp_layers:
        notes.append("--exclude-mtp: there are no MTP layers to leave out")
        return dict(tensors), config
    notes.append(f"MTP layers left out: {config.mtp_layers} (--exclude-mtp)")
    return without_mtp_layers(tensors, config), config.with_mtp_layers(0)


def _check_all_read(stored: Mapping[str, LazyTensor], tensors: Mapping[str, LazyTensor]) -> None:
    unused = sorted(stored.keys() - _leaves(tensors.values()))
    raise_problems(
        f"{len(unused)} tensors of the source are no part of the model and would get lost:", unused
    )


def _check_all_written(tensors: Mapping[str, LazyTensor], entries: Iterable[Entry]) -> None:
    written = _leaves(entry.tensor for entry in entries)
    lost = sorted(_leaves(tensors.values()) - written)
    raise_problems(f"{len(lost)} tensors of the source would not get into the target:", lost)


def _check_parts(parts: Sequence[Part]) -> None:
    """Refuse a plan with two parts, or two blocks of a tensor, of the same name."""
    names = Counter(part.name for part in parts)
    blocks = Counter((entry.key, entry.offset) for part in parts for entry in part.entries)
    twice = [str(what) for counter in (names, blocks) for what, n in counter.items() if n > 1]
    raise_problems("The target would have the same thing twice:", twice)


def _leaves(tensors: Iterable[LazyTensor]) -> set[str]:
    return set[str]().union(*(tensor.leaves for tensor in tensors))


def fingerprint_of(plan: ConversionPlan, options: TargetOptions, hf_config: Path | None) -> dict:
    """What the result of a conversion depends on, as JSON; equal fingerprints allow resuming."""
    source = plan.checkpoint.path
    given = hf_config.read_bytes() if hf_config is not None else b""
    like = options.quantised_like
    return {
        "tool version": __version__,
        "source": str(source.resolve()),
        "source file": source_files(source),
        "--hf-config": hashlib.sha256(given).hexdigest(),
        "--quantised-like": source_files(like) if like is not None else {},
        "format": plan.writer.format,
        "option": options_as_json(options),
        "part": {part.name: checksum_of(_entries(part)) for part in plan.parts},
    }


def options_as_json(options: TargetOptions) -> dict:
    """The options of a target as JSON fields; dtypes by name."""
    fields = asdict(options)
    if options.dtype is not None:
        fields["dtype"] = dtype_name(options.dtype)
    if options.quantised_like is not None:
        fields["quantised_like"] = str(options.quantised_like.resolve())
    return fields | (fields.pop("layout") or {})


def source_files(path: Path) -> dict[str, list[int]]:
    """Size and modification time of every file of a checkpoint, by relative path."""
    folder = weights_folder(path)
    result = {}
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            file = Path(root, name)
            if file.exists():
                status = file.stat()
                relative = file.relative_to(folder).as_posix()
                result[relative] = [status.st_size, status.st_mtime_ns]
    return result


def checksum_of(document: dict | list) -> str:
    """SHA-256 of a JSON document, in hex."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _entries(part: Part) -> list:
    return [
        (entry.key, entry.offset, entry.tensor.shape, str(entry.tensor.dtype))
        for entry in part.entries
    ]
