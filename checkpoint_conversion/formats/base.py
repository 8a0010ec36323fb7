"""Interface of a checkpoint format: a ``Checkpoint`` to read from, a ``Writer`` to write with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.manifest import TensorRecord
from checkpoint_conversion.model import ModelConfig

# Called with the size in bytes of each tensor that has been written.
Progress = Callable[[int], None]


class Checkpoint(ABC):
    """A checkpoint that is open for reading: headers have been read, tensor values have not.

    Attributes:
        format: Name of the format, as ``--to`` takes it.
        path: As the user gave it.
        config: The model's dimensions.
        layout: Properties in which checkpoints of this format differ, for reports; name -> value.
        stored: Every weight by its name in the files. Names that several ranks' files share are
            made unique by a prefix.
        left_alone: What is stored but is no weight (optimizer states, random states): name ->
            size in bytes.
        auxiliary: Files of the model that are copied unchanged (config.json, tokenizer): name ->
            path, with links resolved.
        auxiliary_folder: The folder where they have these names; it need not exist.
        notes: What a user should know about the checkpoint, one line each.
    """

    format: str
    path: Path
    config: ModelConfig
    layout: dict[str, object]
    stored: Mapping[str, LazyTensor]
    left_alone: Mapping[str, int]
    auxiliary: Mapping[str, Path]
    auxiliary_folder: Path
    notes: list[str]

    @abstractmethod
    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """Every weight of the model under its Hugging Face name, dequantised.

        Args:
            dtype: Dtype of dequantised weights (None: bfloat16). Other weights keep theirs.

        Raises:
            CheckpointError: Listing every tensor that is unknown, missing or misshapen.
        """


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Options of the target; a format refuses those that it does not have.

    Attributes:
        dtype: Dtype of the weights; None keeps each tensor's own.
        fp8: Quantise to FP8 blocks of 128 x 128 with ``"float"`` or ``"ue8m0"`` scales (``hf``
            only); None does not quantise.
        quantised_like: Folder of a Hugging Face checkpoint with four-bit weights, whose weights are
            written in its format (``hf`` only); groups that are equal keep its bits.
        norms: ``"fused"`` (TransformerEngine) or ``"separate"`` (local layers); None: the format's
            own default.
        kv_up: ``"combined"`` or ``"split"``.
        down: ``"separate"`` or ``"fused"`` (one ``linear_qkv_down_proj``).
        layout: Values of the options of further layouts (``absorbed_mla/checkpoint/layouts``).
        layers: ``"numbered"`` or ``"stacked"`` (one tensor for all layers), None: what Megatron
            writes for the architecture.
        vocab_multiple: The vocabulary is padded with zeros to a multiple of this; None: no
            padding.
        iteration: Iteration number of a Megatron checkpoint; None writes a release.
        max_shard_bytes: Upper bound on a file of several tensors; None: bounded by memory only.
    """

    dtype: torch.dtype | None = None
    fp8: str | None = None
    quantised_like: Path | None = None
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
    """One tensor, or one block of a tensor, in a part of the target.

    Attributes:
        key: Name in the target.
        tensor: Its values, in the target's dtype and shape.
        offset: Position of the block in the whole tensor; None if it is the whole tensor.
        whole_shape: Shape of the whole tensor; None if it is the whole tensor.
    """

    key: str
    tensor: LazyTensor
    offset: tuple[int, ...] | None = None
    whole_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Part:
    """Tensors that are written, synced to disk and recorded together: the unit of resuming.

    Attributes:
        name: Unique, and the same each time the same conversion is planned.
        entries: Its tensors and blocks of tensors.
        peak: Bytes of resident memory needed while it is written.
    """

    name: str
    entries: tuple[Entry, ...]
    peak: int

    @property
    def nbytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(entry.tensor.nbytes for entry in self.entries)


@dataclass
class PartResult:
    """The record of a written part; it can be stored as JSON.

    Attributes:
        name: Name of the part.
        files: Size in bytes of each file that was written, by path relative to the target's folder.
        tensors: One record per entry.
        storage: Data that the writer's ``finish`` needs.
    """

    name: str
    files: dict[str, int]
    tensors: list[TensorRecord]
    storage: dict = field(default_factory=dict)


Unit = TypeVar("Unit")


def filled(
    units: Iterable[Unit], limit: int, nbytes: Callable[[Unit], int]
) -> Iterator[list[Unit]]:
    """Units in order, in groups of at most ``limit`` bytes; a larger unit is alone."""
    group: list[Unit] = []
    used = 0
    for unit in units:
        size = nbytes(unit)
        if group and used + size > limit:
            yield group
            group, used = [], 0
        group.append(unit)
        used += size
    if group:
        yield group


class Writer(ABC):
    """Writes one target. Parts may be written in any order and by several threads.

    Args:
        config: The model's dimensions.
        options: Options of the target.

    Raises:
        CheckpointError: If the format or the model does not have an option, naming the option.
    """

    format: str
    config: ModelConfig
    options: TargetOptions

    @abstractmethod
    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        """Assign tensors to parts.

        Args:
            tensors: Every weight of the model by its Hugging Face name, in the target's dtypes.
            part_bytes: Upper bound on the bytes of a part's tensors, unless one tensor has more.

        Raises:
            CheckpointError: If a tensor is missing, unknown or misshapen.
        """

    @abstractmethod
    def layout(self) -> dict[str, object]:
        """The :attr:`Checkpoint.layout` of the result."""

    @abstractmethod
    def write_part(
        self, folder: Path, part: Part, session: ReadSession, progress: Progress
    ) -> PartResult:
        """Write a part's files into ``folder``; the caller syncs them to disk."""

    @abstractmethod
    def finish(
        self, folder: Path, results: list[PartResult], auxiliary: Mapping[str, Path]
    ) -> None:
        """Write index or metadata, which complete the checkpoint, and the auxiliary files.

        Args:
            folder: The folder of the parts.
            results: The results of all parts, in the order of the plan.
            auxiliary: The source's :attr:`Checkpoint.auxiliary`.
        """
