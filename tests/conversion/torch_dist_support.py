"""Distributed checkpoints: written by the package, read by it, saved and loaded by Megatron."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from checkpoint_conversion.formats.base import PartResult, TargetOptions
from checkpoint_conversion.formats.torch_dist import TorchDistCheckpoint
from checkpoint_conversion.formats.torch_dist_writer import TorchDistWriter
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import in_memory, load_all, write_with

# Small enough that a tiny model has many files.
PART_BYTES = 1 << 14


def write_torch_dist(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], to: str = "megatron", **options
) -> list[PartResult]:
    """Write a checkpoint with the package."""
    return write_lazy(folder, config, in_memory(tensors), to, **options)


def write_lazy(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, LazyTensor],
    to: str = "megatron",
    part_bytes: int = PART_BYTES,
    **options,
) -> list[PartResult]:
    """Write a checkpoint of tensors that need not be in memory."""
    writer = TorchDistWriter(config, TargetOptions(**options), to)
    return write_with(writer, folder, tensors, part_bytes)


def read_torch_dist(folder: Path) -> dict[str, Tensor]:
    """Hugging Face's tensors of a checkpoint."""
    return load_all(TorchDistCheckpoint(folder).hugging_face_tensors())
