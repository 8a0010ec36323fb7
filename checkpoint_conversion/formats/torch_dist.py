"""Reading ``megatron`` and ``absorbed``: distributed checkpoints of Megatron (torch_dist)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint_conversion.checkpoint_folder import is_torch_dist, weights_folder
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.formats.chunked_tensor import ChunkedTensor
from checkpoint_conversion.formats.megatron_folder import auxiliary_files, read_config
from checkpoint_conversion.formats.torch_dist_names import (
    are_stacked,
    example_names,
    is_left_alone,
    mtp_layer_count,
    numbered_tensors,
)
from checkpoint_conversion.formats.torch_dist_state import (
    COMMON_STATE,
    arguments,
    check_backend,
    is_extra_state,
    iteration,
    read_common_state,
    states_in_use,
)
from checkpoint_conversion.formats.torch_dist_storage import METADATA, Storage
from checkpoint_conversion.layouts import KV_UP, MegatronLayout, canonical_tensors, without_padding
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import to_hugging_face
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.safe_paths import file_inside


class TorchDistCheckpoint(Checkpoint):
    """A distributed checkpoint of a standard or an absorbed model.

    Args:
        path: The folder of all iterations, or of one.
        hf_config: A config.json to use instead of what the checkpoint says of itself.
        follow_links: Whether links may lead out of the folder.

    Raises:
        CheckpointError: If it cannot be read, contradicts itself, or nothing says what the model
            is.
    """

    def __init__(
        self, path: Path, hf_config: Path | None = None, follow_links: bool = False
    ) -> None:
        self.path, self.notes = path, []
        folder = weights_folder(path)
        # The folder itself may be a link.
        metadata = (folder / METADATA).relative_to(path).as_posix()
        file_inside(path, metadata, follow_links=follow_links)
        check_backend(folder, follow_links)
        storage = Storage(folder, follow_links)
        self._weights = storage.read([n for n in storage.tensors if not is_left_alone(n)])
        self.auxiliary = auxiliary_files(folder, follow_links)
        common = self._read_common(folder, storage, follow_links, hf_config)
        config = read_config(hf_config, self.auxiliary, arguments(common))
        self.config = dataclasses.replace(config, mtp_layers=mtp_layer_count(self._weights))
        self.stored = {name: tensor.lazy() for name, tensor in self._weights.items()}
        self.left_alone = self._left_alone(storage)
        absorbed = has_absorbed_blocks(self._weights, self.config)
        self.format = "absorbed" if absorbed else "megatron"
        self._layout = MegatronLayout.recognise(example_names(self._weights))
        self.layout = describe(self._layout, are_stacked(self._weights), iteration(common))
        _, padding = without_padding(self.stored, self.config.vocab_size)
        if padding:
            self.notes.append(f"{padding} rows of padding after the vocabulary are dropped")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Whether there is such a checkpoint at ``path``."""
        return is_torch_dist(path)

    def hugging_face_tensors(self, dtype: torch.dtype | None = None) -> dict[str, LazyTensor]:
        """See :meth:`Checkpoint.hugging_face_tensors`; there is no FP8 to dequantise."""
        numbered = numbered_tensors(self._weights, self.config)
        tensors, _ = without_padding(numbered, self.config.vocab_size)
        return to_hugging_face(canonical_tensors(tensors, self.config), self.config)

    def _read_common(
        self, folder: Path, storage: Storage, follow_links: bool, hf_config: Path | None
    ) -> Mapping[str, object]:
        try:
            return read_common_state(folder, storage, follow_links)
        except CheckpointError as error:
            # Where the model is known without it, nothing of it is needed.
            if hf_config is None and "config.json" not in self.auxiliary:
                raise
            self.notes.append(f"the arguments of the training are not read: {error}")
            return {}

    def _left_alone(self, storage: Storage) -> dict[str, int]:
        states = states_in_use(storage)
        if states:
            self.notes.append(
                f"{len(states)} modules have FP8 states of TransformerEngine, which are left alone "
                f"(the first: {next(iter(states))})"
            )
        left = {name for name in storage.tensors if is_left_alone(name)} | states.keys()
        for name in storage.objects:
            if is_extra_state(name) or name == COMMON_STATE:
                continue
            left.add(name)
            if not is_left_alone(name):
                self.notes.append(f"{name} is an object of an unknown kind, which is left alone")
        everything = (*storage.tensors, *storage.objects)
        return {name: storage.nbytes(name) for name in everything if name in left}


def has_absorbed_blocks(weights: Mapping[str, ChunkedTensor], config: ModelConfig) -> bool:
    """Whether K/V up-projections are stored in the blocks of rows that an absorbed model writes.

    A standard model's ranks store the rows of whole heads.
    """
    block = block_rows(config)
    tensors = [tensor for name, tensor in weights.items() if name.endswith(KV_UP)]
    return bool(tensors) and all(
        len(tensor.shape) >= 2 and tensor.chunk_size(min(tensor.chunks))[-2] == block
        for tensor in tensors
    )


def block_rows(config: ModelConfig) -> int:
    """Rows of the largest blocks that the K and the V rows of every head consist of."""
    return math.gcd(config.qk_nope_head_dim, config.v_head_dim)


def describe(layout: MegatronLayout, stacked: bool, iteration: int | None) -> dict[str, object]:
    """What distinguishes distributed checkpoints, for people.

    Args:
        layout: Of the tensors of a layer.
        stacked: Whether layers are.
        iteration: None of a release.
    """
    result = layout.describe() | {"layers": "stacked" if stacked else "numbered"}
    return result if iteration is None else result | {"iteration": iteration}
