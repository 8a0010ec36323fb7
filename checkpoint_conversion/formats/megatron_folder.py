"""What Megatron's formats have in common: the folder of a checkpoint, and reading its tensors.

DST/latest_checkpointed_iteration.txt     "release", or the number of an iteration
DST/release/  or  DST/iter_0000100/       the weights
DST/release/hugging_face/                 config.json and tokenizer, which Megatron does not store
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from checkpoint_conversion.checkpoint_folder import (
    CONFIG,
    MAX_CONFIG_BYTES,
    TRACKER,
    files_inside,
    read_json,
    weights_folder,
)
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.formats.vocabulary_padding import check_padding
from checkpoint_conversion.layouts import canonical_tensors, without_padding
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import to_hugging_face, without_tied_head
from checkpoint_conversion.megatron_args import from_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.router_comparison import refuse_another_function
from checkpoint_conversion.routing import GROUP_SCORE, NORMALISED
from checkpoint_conversion.source import Source

AUXILIARY = "hugging_face"
_ANOTHER_FUNCTION = (
    "The checkpoint's arguments describe another router, or scaling of queries, than {path}. If it "
    "was trained with that one, give --hf-config with a config.json that says so "
    f"({GROUP_SCORE} and {NORMALISED} are read, too); if it was converted by an earlier release "
    "and not trained, convert the original again:"
)


class MegatronCheckpoint(Checkpoint):
    """Base class of the readers of Megatron's formats.

    Args:
        path: The folder of all iterations, or of one of them.
        how: Further fields of :class:`Source`.

    Attributes:
        source: Both.
        folder: Of the weights.
    """

    def __init__(self, path: Path, **how: Any) -> None:
        self.source, self.path, self.notes = Source(path, **how), path, []
        self.folder = weights_folder(path)
        self.auxiliary_folder = self.folder / AUXILIARY
        self.auxiliary = {}
        if self.auxiliary_folder.is_dir():
            links = self.source.follow_links
            self.auxiliary = files_inside(self.auxiliary_folder, follow_links=links)

    def describe_model(
        self, args: Mapping[str, object], mtp_layers: int, rows: int, states: Collection[str]
    ) -> None:
        """Set ``config``, and add to the notes.

        Args:
            args: The training's arguments; empty if the checkpoint has none.
            mtp_layers: Multi-token-prediction layers of the weights.
            rows: Of the embedding.
            states: Names of module states that are not empty, for which no other format has room.

        Raises:
            CheckpointError: If nothing describes the model, or rows of tokens would be lost.
        """
        config = self._read_config(args)
        self.config = dataclasses.replace(config, mtp_layers=mtp_layers)
        size, drop = config.vocab_size, self.source.drop_tokens
        self.notes += check_padding(size, rows - size, self.auxiliary, args, drop)
        if states:
            self.notes.append(
                f"{len(states)} modules have FP8 states of TransformerEngine, which are left alone "
                f"(the first: {next(iter(states))})"
            )

    def _read_config(self, args: Mapping[str, object]) -> ModelConfig:
        """From the first source that there is: a user's config.json, that beside the weights, args.

        Arguments beside a config.json must describe the same router and scaling of queries: the
        weights do not show them.
        """
        path = self.source.hf_config or self.auxiliary.get(CONFIG)
        if path is not None:
            config = ModelConfig.from_hugging_face(read_json(path, MAX_CONFIG_BYTES))
            refuse_another_function(config, args, _ANOTHER_FUNCTION.format(path=path))
            return config
        if args:
            return from_megatron_args(args)
        raise CheckpointError(
            f"nothing says what the model is: the checkpoint has neither args nor "
            f"{AUXILIARY}/{CONFIG}; give its config.json with --hf-config"
        )

    @abstractmethod
    def whole_tensors(self) -> dict[str, LazyTensor]:
        """The model's tensors without parallelism, layers and experts numbered, in any layout.

        Raises:
            CheckpointError: If the files contradict themselves or the model.
        """

    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """See :meth:`Checkpoint.hugging_face_tensors`; there is no FP8 to dequantise."""
        problems: list[str] = []
        tensors = without_tied_head(self.whole_tensors(), self.config, problems)
        raise_problems("The Megatron tensors do not fit the model:", problems)
        tensors = without_padding(tensors, self.config.vocab_size)
        return to_hugging_face(canonical_tensors(tensors, self.config), self.config)


def inner_name(iteration: int | None) -> str:
    """Name of the weights' folder; ``iteration`` None means a release."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def write_around(
    folder: Path, iteration: int | None, config: ModelConfig, auxiliary: Mapping[str, Path]
) -> None:
    """Write the tracker file, config.json and the auxiliary files, whose config.json is ignored."""
    beside = folder / inner_name(iteration) / AUXILIARY
    beside.mkdir(parents=True, exist_ok=True)
    for name, path in auxiliary.items():
        if name != CONFIG:
            shutil.copyfile(path, beside / name)
    (beside / CONFIG).write_text(json.dumps(config.hugging_face, indent=2) + "\n")
    (folder / TRACKER).write_text("release" if iteration is None else str(iteration))
