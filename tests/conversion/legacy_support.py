"""Checkpoints of one file per rank: written by the package, loaded and changed by torch."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from checkpoint_conversion.formats.legacy_writer import LegacyWriter
from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.formats.base import PartResult, TargetOptions
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import in_memory, load_all


def write_legacy(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], **options
) -> list[PartResult]:
    """Write a checkpoint with the package."""
    return write_lazy(folder, config, in_memory(tensors), **options)


def write_lazy(
    folder: Path, config: ModelConfig, tensors: dict[str, LazyTensor], **options
) -> list[PartResult]:
    """Write a checkpoint of tensors that need not be in memory."""
    writer = LegacyWriter(config, TargetOptions(**options))
    results = []
    for part in writer.plan(tensors, 1 << 20):
        with ReadSession() as session:
            results.append(writer.write_part(folder, part, session, lambda nbytes: None))
    writer.finish(folder, results, {})
    return results


def read_legacy(folder: Path) -> dict[str, Tensor]:
    """Hugging Face's tensors of a checkpoint."""
    return load_all(LegacyCheckpoint(folder).hugging_face_tensors())


def load_rank(folder: Path, **how) -> dict:
    """What torch finds in the file in a rank's folder."""
    # Not for a moment only: leaving torch's safe_globals() would take it from Megatron, too.
    torch.serialization.add_safe_globals([argparse.Namespace])
    return torch.load(folder / RANK_FILE, weights_only=True, **how)


def save_rank(folder: Path, content: dict) -> None:
    """Save a rank's file with torch."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / RANK_FILE)


def change_rank(folder: Path, change) -> None:
    """Load a rank's file, change its content and save it."""
    content = load_rank(folder)
    change(content)
    save_rank(folder, content)


def only_args_config(folder: Path) -> None:
    """Remove config.json, so that the args must say what the model is."""
    for path in folder.glob("*/hugging_face/config.json"):
        path.unlink()
