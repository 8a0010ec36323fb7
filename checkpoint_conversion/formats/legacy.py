"""Reading ``megatron-legacy``: Megatron's former format, one ``model_optim_rng.pt`` per rank.

It is read only: a distributed checkpoint (``megatron``) loads at any parallel sizes instead.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from checkpoint_conversion.checkpoint_folder import RANK_FILE, rank_folders, weights_folder
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.formats.legacy_merge import merged_tensors, recognise_sharding
from checkpoint_conversion.formats.legacy_names import experts_kind, mtp_layer_count
from checkpoint_conversion.formats.legacy_ranks import (
    Rank,
    RankFile,
    Sizes,
    folder_problems,
    read_rank_file,
    sizes_of,
)
from checkpoint_conversion.formats.megatron_folder import auxiliary_files, read_config
from checkpoint_conversion.layouts import canonical_tensors, without_padding
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import to_hugging_face


class LegacyCheckpoint(Checkpoint):
    """A per-rank checkpoint, opened by reading the pickles of all ranks' files.

    Args:
        path: The folder of all iterations, or of one of them.
        hf_config: A config.json to use instead of what the checkpoint says of itself.
        follow_links: Whether links may lead out of the folder.

    Raises:
        CheckpointError: If rank files are missing, superfluous or damaged, or nothing describes
            the model.
    """

    format = "megatron-legacy"

    def __init__(
        self, path: Path, hf_config: Path | None = None, follow_links: bool = False
    ) -> None:
        self.path = path
        inner = weights_folder(path)
        self.sizes, self._files = _read_files(path, inner, follow_links)
        first = self._files[Rank()]
        self.auxiliary = auxiliary_files(inner, follow_links)
        config = read_config(hf_config, self.auxiliary, first.args)
        names = [name for file in self._files.values() for name in file.weights]
        self.config = dataclasses.replace(config, mtp_layers=mtp_layer_count(names))
        self._sharding = recognise_sharding(self.config, self.sizes, self._files)
        self.stored, self.left_alone = {}, {}
        for file in self._files.values():
            for name, tensor in file.weights.items():
                self.stored[f"{file.folder}/{name}"] = tensor.lazy(f"{file.folder}/{name}")
            for name, size in file.left_alone.items():
                self.left_alone[f"{file.folder}/{name}"] = size
        self.layout = self._sharding.describe(experts_kind(names), first.iteration)
        self.notes = self._make_notes()

    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """See :meth:`Checkpoint.hugging_face_tensors`; there is no FP8 to dequantise."""
        tensors = merged_tensors(self._sharding, self._files, self.stored)
        tensors, _ = without_padding(tensors, self.config.vocab_size)
        canonical = canonical_tensors(tensors, self.config)
        return to_hugging_face(canonical, self.config)

    def _make_notes(self) -> list[str]:
        notes = []
        padding = self._sharding.vocab_rows - self.config.vocab_size
        if padding:
            notes.append(f"{padding} rows of padding after the vocabulary are dropped")
        states = [name for name in self.left_alone if name.endswith("_extra_state")]
        if states:
            notes.append(
                f"{len(states)} modules have FP8 states of TransformerEngine, which are left alone "
                f"(the first: {states[0]})"
            )
        return notes


def _read_files(root: Path, inner: Path, follow_links: bool) -> tuple[Sizes, dict[Rank, RankFile]]:
    """The sizes of the grid of ranks, and every rank's file."""
    folders = {path.name: path for path in rank_folders(inner)}
    if not folders:
        raise CheckpointError(f"{inner} has no mp_rank_*/{RANK_FILE}")
    # Any rank's args give the sizes; folder names alone are ambiguous.
    first = read_rank_file(root, next(iter(folders.values())), follow_links)
    sizes = sizes_of(first.args, folders)
    problems = folder_problems(folders, sizes)
    if problems:
        raise CheckpointError(f"{inner} is not complete:", problems)
    files = {}
    for rank in sizes.ranks():
        folder = folders[sizes.folder(rank)]
        same = folder.name == first.folder
        files[rank] = first if same else read_rank_file(root, folder, follow_links)
    if len({file.iteration for file in files.values()}) > 1:
        raise CheckpointError(
            f"{inner} has files of different iterations:",
            [f"{file.folder} is of iteration {file.iteration}" for file in files.values()],
        )
    return sizes, files
