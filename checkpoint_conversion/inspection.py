"""``inspect``: format, model, sizes and problems of a checkpoint, from its headers alone.

Among it is the model as options of Megatron's command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpoint_conversion.checkpoint_folder import weights_folder
from checkpoint_conversion.config_fields import dtype_name
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.manifest import find_manifest, read_manifest
from checkpoint_conversion.mapping import count_parameters
from checkpoint_conversion.megatron_args import megatron_notes
from checkpoint_conversion.megatron_options import megatron_options, option_notes, without_option
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.planning import dtype_notes
from checkpoint_conversion.progress import format_bytes
from checkpoint_conversion.report import describe_layout, table

# Problems that are printed; --json has all of them.
_PROBLEMS_SHOWN = 10
# Fields of the model that are printed on a line of their own.
_LAYER_FIELDS = ("model_type", "num_layers", "moe_layers", "mtp_layers", "tied_embeddings")
# Of ModelConfig, and what some of them are called here.
_SIZES = """
model_type num_layers mtp_layers tied_embeddings vocab_size hidden_size ffn_hidden_size
num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
"""
_SIZES_OF_EXPERTS = "moe_ffn_hidden_size num_experts num_shared_experts router_bias"
_CALLED = {f"num_{name}": name for name in ("experts", "shared_experts")}
_CALLED["num_attention_heads"] = "heads"


@dataclass(frozen=True, kw_only=True)
class DtypeCount:
    """Number and size in bytes of the tensors of one dtype."""

    tensors: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Description of a checkpoint.

    Attributes:
        path: As the user gave it.
        format: Name of the format.
        layout: Properties in which checkpoints of this format differ; name -> value.
        model: The model's type and dimensions.
        tensors: Number of stored tensors.
        parameters: Number of the model's weights; None if the tensors do not fit.
        dtypes: Stored weights by dtype.
        files: Number of files in the folder of the weights.
        file_bytes: Size of all these files.
        left_alone: Number and size of stored entries that are no weights, such as optimizer states.
        auxiliary: Files that a conversion copies unchanged (tokenizer, config.json).
        manifest: Summary of the manifest; None if this package did not write the checkpoint.
        megatron_options: Words of Megatron's command line that describe the model.
        without_option: Fields of Megatron's config that its command line has no option for.
        notes: What a user should know, one line each.
        problems: Why it cannot be converted, one line each.
    """

    path: str
    format: str
    layout: dict[str, object]
    model: dict[str, object]
    tensors: int
    parameters: int | None
    dtypes: dict[str, DtypeCount]
    files: int
    file_bytes: int
    left_alone: DtypeCount
    auxiliary: list[str]
    manifest: str | None
    megatron_options: list[str]
    without_option: dict[str, float]
    notes: list[str]
    problems: list[str]

    def as_json(self) -> dict:
        """One JSON document."""
        line = shlex.join(self.megatron_options)
        return {"command": "inspect", **asdict(self), "megatron_command_line": line}

    def lines(self) -> Iterator[str]:
        """A table, and the model's options of Megatron as one line for a shell."""
        yield from table(self._rows())
        yield ""
        yield "The model on Megatron's command line:"
        yield shlex.join(self.megatron_options)

    def _rows(self) -> Iterator[tuple[str, str]]:
        widths = [f"{k} {v}" for k, v in self.model.items() if k not in _LAYER_FIELDS]
        half = (len(widths) + 1) // 2
        yield "checkpoint", self.path
        yield "format", self.format
        yield "layout", describe_layout(self.layout)
        yield "model", f"{self.model['model_type']}, {self._layers()}"
        yield "dimensions", ", ".join(widths[:half])
        yield "dimensions", ", ".join(widths[half:])
        counted = "unknown" if self.parameters is None else f"{self.parameters:,}"
        yield "parameters", counted
        yield "tensors", f"{self.tensors:,}"
        for name, count in self.dtypes.items():
            yield "dtypes", f"{name}: {count.tensors:,} tensors, {format_bytes(count.bytes)}"
        yield "files", f"{self.files:,}, {format_bytes(self.file_bytes)}"
        if self.left_alone.tensors:
            size = format_bytes(self.left_alone.bytes)
            number = f"{self.left_alone.tensors:,}"
            yield "left alone", f"{number} entries (training state, images), {size}"
        yield "beside them", ", ".join(self.auxiliary) or "nothing"
        yield "manifest", self.manifest or "none"
        for note in self.notes:
            yield "notes", note
        for problem in self.problems[:_PROBLEMS_SHOWN]:
            yield "problems", problem
        if len(self.problems) > _PROBLEMS_SHOWN:
            yield "problems", f"... and {len(self.problems) - _PROBLEMS_SHOWN} more (--json)"

    def _layers(self) -> str:
        layers, moe, mtp = (self.model[f"{name}_layers"] for name in ("num", "moe", "mtp"))
        assert isinstance(layers, int) and isinstance(moe, int)
        text = f"{layers} layers ({layers - moe} dense, {moe} MoE)"
        if mtp:
            text += f" and {mtp} for multi-token prediction"
        return f"{text}, tied embeddings" if self.model["tied_embeddings"] else text


def inspect_checkpoint(path: Path, **how: Any) -> Inspection:
    """Describe the checkpoint in a folder from its headers; ``how`` are fields of :class:`Source`.

    Raises:
        CheckpointError: If it is no checkpoint, or its headers cannot be read. Tensors that do not
            fit the model are listed in the result's problems instead.
    """
    checkpoint = open_checkpoint(path, **how)
    problems: list[str] = []
    parameters = _parameters(checkpoint, problems)
    manifest = _manifest(path, problems)
    files = [file for file in weights_folder(path).rglob("*") if file.is_file()]
    left = checkpoint.left_alone
    return Inspection(
        path=str(path),
        format=checkpoint.format,
        layout=checkpoint.layout,
        model=_model(checkpoint.config),
        tensors=len(checkpoint.stored),
        parameters=parameters,
        dtypes=_dtypes(checkpoint.stored.values()),
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        left_alone=DtypeCount(tensors=len(left), bytes=sum(left.values())),
        auxiliary=sorted(checkpoint.auxiliary),
        manifest=manifest,
        megatron_options=megatron_options(checkpoint.config),
        without_option=without_option(checkpoint.config),
        notes=checkpoint.notes
        + dtype_notes(checkpoint)
        + megatron_notes(checkpoint.config)
        + option_notes(checkpoint.config),
        problems=problems,
    )


def _parameters(checkpoint: Checkpoint, problems: list[str]) -> int | None:
    try:
        tensors: Mapping[str, LazyTensor] = checkpoint.hugging_face_tensors()
    except CheckpointError as error:
        problems += [str(error).splitlines()[0], *error.problems]
        return None
    return count_parameters({name: t.shape for name, t in tensors.items()}, checkpoint.config)


def _manifest(path: Path, problems: list[str]) -> str | None:
    found = find_manifest(path)
    if found is None:
        return None
    try:
        manifest = read_manifest(found)
    except CheckpointError as error:
        problems += [str(error).splitlines()[0], *error.problems]
        return "damaged"
    return (
        f"{manifest.algorithm} checksums of {len(manifest.tensors):,} tensors, converted from "
        f"{manifest.source.get('format')} by version {manifest.tool_version}"
    )


def _model(config: ModelConfig) -> dict[str, object]:
    moe = sum(config.moe_layers)
    names = _SIZES.split() + (_SIZES_OF_EXPERTS.split() if moe else [])
    sizes = {_CALLED.get(name, name): getattr(config, name) for name in names}
    return {**sizes, "moe_layers": moe, **_indexer(config)}


def _indexer(config: ModelConfig) -> dict[str, object]:
    indexer = config.indexer
    if indexer is None:
        return {}
    return {
        "index_layers": sum(map(indexer.selects, range(config.num_layers))),
        "index_heads": indexer.heads,
        "index_head_dim": indexer.width,
        "index_topk": indexer.topk,
    }


def _dtypes(tensors: Iterable[LazyTensor]) -> dict[str, DtypeCount]:
    result: dict[str, DtypeCount] = {}
    for tensor in tensors:
        name = dtype_name(tensor.dtype)
        before = result.get(name, DtypeCount(tensors=0, bytes=0))
        result[name] = DtypeCount(tensors=before.tensors + 1, bytes=before.bytes + tensor.nbytes)
    return result
