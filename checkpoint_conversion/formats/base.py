"""What the conversion asks of a format: a checkpoint to read from, a writer to write with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_conversion.checksums import RunningChecksum
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.model import ModelConfig

# Called with the bytes of every tensor that has been written.
Progress = Callable[[int], None]


class Checkpoint(ABC):
    """A checkpoint that is open for reading: its headers have been read, its values have not.

    Attributes:
        format: Name of the format, as ``--to`` takes it.
        path: As the user gave it.
        config: The model's dimensions.
        layout: What distinguishes checkpoints of this format, for people; name -> value.
        stored: Every weight under the name it is stored by. A name that several files hold (one per
            rank) is made unique by the reader.
        left_alone: Names of what is stored but is no weight (optimizer states, random states),
            each with the number of its bytes.
        auxiliary: Files that belong to the model and travel with it unchanged (config.json,
            tokenizer), by name.
        notes: What a user should know about the checkpoint, one line each.
    """

    format: str
    path: Path
    config: ModelConfig
    layout: dict[str, object]
    stored: Mapping[str, LazyTensor]
    left_alone: Mapping[str, int]
    auxiliary: Mapping[str, Path]
    notes: list[str]

    @abstractmethod
    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """Every weight of the model under its Hugging Face name, FP8 dequantised.

        Args:
            dtype: What FP8 weights are dequantised to (None: bfloat16). Nothing else changes.

        Raises:
            CheckpointError: Listing every tensor that is unknown, missing or misshapen.
        """


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """How the target is to be written; a format refuses what it cannot do.

    Attributes:
        dtype: Of the weights; None keeps each tensor's own.
        fp8: ``"float"`` or ``"ue8m0"`` scales to quantise to 128 x 128 blocks (``hf`` only), or
            None.
        norms: ``"fused"`` (TransformerEngine) or ``"separate"`` (local layers); None: the format's
            own default.
        kv_up: ``"combined"`` or ``"split"``.
        down: ``"separate"`` or ``"fused"`` (one ``linear_qkv_down_proj``).
        layout: Values of the options of further layouts (``absorbed_mla/checkpoint/layouts``).
        layers: ``"numbered"`` or ``"stacked"`` (one tensor for all layers), None: what Megatron
            writes for the architecture.
        vocab_multiple: The vocabulary is padded with zeros to a multiple of this; None: the
            format's default.
        iteration: Iteration number of a Megatron checkpoint; None writes a release.
        max_shard_bytes: Upper bound of a file, where it can be chosen; None: chosen by memory.
    """

    dtype: torch.dtype | None = None
    fp8: str | None = None
    norms: str | None = None
    kv_up: str = "combined"
    down: str = "separate"
    layout: Mapping[str, str] | None = None
    layers: str | None = None
    vocab_multiple: int | None = None
    iteration: int | None = None
    max_shard_bytes: int | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor, or one block of a tensor, that a part of the target holds.

    Attributes:
        key: Name in the target.
        tensor: Where its values come from, in the target's dtype and shape.
        offset: Position of the block in the whole tensor; None if it is the whole tensor.
        whole_shape: Shape of the whole tensor; None if it is the whole tensor.
    """

    key: str
    tensor: LazyTensor
    offset: tuple[int, ...] | None = None
    whole_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Part:
    """What is written, made durable and recorded together: the unit of resuming.

    Attributes:
        name: Unique, and the same whenever the same conversion is planned.
        entries: What it holds.
        peak: Bytes resident while it is written.
    """

    name: str
    entries: tuple[Entry, ...]
    peak: int

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(entry.tensor.nbytes for entry in self.entries)


@dataclass
class PartResult:
    """What a written part left; JSON can hold it.

    Attributes:
        name: The part's.
        files: Sizes in bytes of the files it wrote, by path relative to the target's folder.
        tensors: One record per entry, of :func:`tensor_record`, with ``fp8_error`` where it was
            quantised.
        storage: Whatever the writer needs to finish.
    """

    name: str
    files: dict[str, int]
    tensors: list[dict]
    storage: dict = field(default_factory=dict)


def tensor_record(
    key: str, values: Tensor, offset: tuple[int, ...] | None = None
) -> dict[str, object]:
    """What :attr:`PartResult.tensors` says of a tensor, or of a block of one.

    Args:
        key: Name in the target.
        values: As they are written.
        offset: Position of a block.
    """
    running = RunningChecksum()
    running.update(values)
    record: dict[str, object] = {
        "key": key,
        "offset": None if offset is None else list(offset),
        "shape": list(values.shape),
        "dtype": str(values.dtype).removeprefix("torch."),
        "checksum": running.hexdigest(),
    }
    if running.not_finite():
        record["not_finite"] = running.not_finite()
    return record


class Writer(ABC):
    """Writes one target. Parts may be written in any order and by several threads.

    Args:
        config: The model's dimensions.
        options: How to write it.

    Raises:
        CheckpointError: If the format cannot do what the options ask for, naming the option.
    """

    format: str
    config: ModelConfig
    options: TargetOptions

    @abstractmethod
    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """Decide what goes where, from Hugging Face names.

        Args:
            tensors: Every weight of the model by its Hugging Face name, dtypes as they will be.
            part_bytes: Bytes that a part's tensors may have together, unless one alone has more.

        Raises:
            CheckpointError: If a tensor is missing, unknown or misshapen.
        """

    @abstractmethod
    def layout(self) -> dict[str, object]:
        """What :attr:`Checkpoint.layout` will say about the result."""

    @abstractmethod
    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """Write a part's files into ``folder``; the caller waits until they are on disk."""

    @abstractmethod
    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """Write what makes the files one checkpoint, and the auxiliary files beside them.

        Args:
            folder: Where the parts are.
            results: Of all parts, in the order of the plan.
            auxiliary: Of the source, see :attr:`Checkpoint.auxiliary`.
        """
