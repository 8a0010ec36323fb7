"""Reading ``megatron-legacy``: Megatron's former format, one ``model_optim_rng.pt`` per rank.

It is read only: a distributed checkpoint (``megatron``) loads at any parallel sizes instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from absorbed_mla.checkpoint.names import KV_DOWN, QKV_DOWN
from checkpoint_conversion.checkpoint_folder import RANK_FILE, rank_folders, weights_folder
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.formats.legacy_ranks import (
    Rank,
    RankFile,
    Sizes,
    folder_problems,
    read_rank_file,
    sizes_of,
    stages_of,
)
from checkpoint_conversion.formats.legacy_sharding import (
    EMBEDDING,
    Sharding,
    Share,
    as_mapped,
    experts_kind,
    is_grouped_mlp,
    layer_count,
    mtp_layer_count,
    split_grouped_mlp,
)
from checkpoint_conversion.formats.megatron_folder import auxiliary_files, read_config
from checkpoint_conversion.layouts import (
    MegatronLayout,
    canonical_tensors,
    padded_size,
    without_padding,
)
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import check_complete, to_hugging_face
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.transforms import same_values


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


_COPIES = "are copies of one weight, but differ"
RankFiles = Mapping[Rank, RankFile]


def recognise_sharding(config: ModelConfig, sizes: Sizes, files: RankFiles) -> Sharding:
    """How the model is distributed over the ranks of a checkpoint, from names and shapes.

    Raises:
        CheckpointError: If the model cannot be distributed over these ranks.
    """
    names = [files[Rank(pipeline=stage)].weights for stage in range(sizes.pipeline)]
    stages = stages_of(map(layer_count, names))
    with_mtp = [stage for stage, own in enumerate(names) if mtp_layer_count(own)]
    problems = []
    if stages[-1].stop != config.num_layers:
        held = ", ".join(str(len(stage)) for stage in stages)
        problems.append(
            f"the stages' files hold {held} layers, together {stages[-1].stop}; the model has "
            f"{config.num_layers}"
        )
    if config.num_experts % sizes.expert:
        problems.append(
            f"{config.num_experts} experts cannot be shared by {sizes.expert} expert-parallel ranks"
        )
    if problems:
        raise CheckpointError("The ranks' files do not fit the model:", problems)
    sharding = Sharding(
        config=config,
        layout=MegatronLayout.recognise(
            as_mapped(name) for file in files.values() for name in file.weights
        ),
        sizes=sizes,
        stages=stages,
        mtp_stage=with_mtp[-1] if with_mtp else sizes.pipeline - 1,
        down_projection=_down_projection(config, sizes, files[Rank()]),
        vocab_rows=_vocab_rows(config, sizes, files[Rank()]),
    )
    problems = sharding.indivisible()
    if problems:
        raise CheckpointError(
            f"{sizes.tensor} tensor-parallel ranks cannot share equally:", problems
        )
    return sharding


def merged_tensors(
    sharding: Sharding, files: RankFiles, stored: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Every tensor of the model, whole and numbered globally, in the layout of the files.

    Args:
        sharding: How the model is distributed.
        files: Of all ranks.
        stored: The tensors of all files, by ``folder/name``.

    Raises:
        CheckpointError: Listing everything that is unknown, missing, misshapen or unreadable in
            any file.
    """
    pieces: dict[str, list[list[LazyTensor]]] = {}
    problems: list[str] = []
    for shares, ranks in _groups(sharding, files, stored, problems):
        for name, share in shares.items():
            if all(name in tensors for tensors in ranks):
                pieces.setdefault(share.whole, []).append([tensors[name] for tensors in ranks])
    for whole, copies in pieces.items():
        dtypes = {str(tensor.dtype) for shares in copies for tensor in shares}
        if len(dtypes) > 1:
            problems.append(f"{whole} is {' and '.join(sorted(dtypes))} on different ranks")
    if problems:
        raise CheckpointError(
            f"The ranks' files do not fit the model; {len(problems)} problems:", problems
        )
    return {
        whole: same_values([sharding.rule(whole).merge(shares) for shares in copies], _COPIES)
        for whole, copies in pieces.items()
    }


def _groups(
    sharding: Sharding,
    files: RankFiles,
    stored: Mapping[str, LazyTensor],
    problems: list[str],
) -> list[tuple[dict[str, Share], list[dict[str, LazyTensor]]]]:
    """Per stage and expert-parallel rank: expected shares, and each TP rank's tensors."""
    sizes, result = sharding.sizes, []
    for stage in range(sizes.pipeline):
        for expert_rank in range(sizes.expert):
            own = [files[Rank(i, stage, expert_rank)] for i in range(sizes.tensor)]
            ranks = [_mapped(file, stored, sharding, problems) for file in own]
            shares = {
                name: share
                for name, share in sharding.shares(stage, expert_rank).items()
                # Older Megatron releases left out some copies of another stage's tensors.
                if not share.copy or any(name in tensors for tensors in ranks)
            }
            expected = {name: share.shape for name, share in shares.items()}
            for file, tensors in zip(own, ranks):
                problems += _unfit(file.folder, tensors, expected)
            result.append((shares, ranks))
    return result


def _mapped(
    file: RankFile, stored: Mapping[str, LazyTensor], sharding: Sharding, problems: list[str]
) -> dict[str, LazyTensor]:
    """A file's tensors under the mapping's names, with the rank's own numbering."""
    problems += file.problems
    config = sharding.config
    experts = config.num_experts // sharding.sizes.expert
    result: dict[str, LazyTensor] = {}
    for name, tensor in file.weights.items():
        leaf = f"{file.folder}/{name}"
        found: dict[str, LazyTensor] | None = {as_mapped(name): stored[leaf]}
        if is_grouped_mlp(name):
            found = split_grouped_mlp(name, tensor, leaf, experts, config.hidden_size)
        if found is None:
            problems.append(
                f"{leaf} has shape {tensor.shape}, which is not that of {experts} experts"
            )
            continue
        twice = found.keys() & result.keys()
        problems += [f"{leaf} is in the file under another name, too" for _ in twice]
        result.update(found)
    return result


def _unfit(
    folder: str, tensors: Mapping[str, LazyTensor], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    try:
        check_complete(tensors, expected, folder)
    except CheckpointError as error:
        return [f"{folder}: {problem}" for problem in error.problems]
    return []


def _down_projection(config: ModelConfig, sizes: Sizes, file: RankFile) -> str:
    """Whether TP ranks split the down-projections, by the shape of the first one."""
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    rows = {KV_DOWN: latent, QKV_DOWN: latent + (config.q_lora_rank or 0)}
    for name, tensor in file.weights.items():
        for end, whole in rows.items():
            if name.endswith(f".{end}") and tensor.shape and sizes.tensor > 1:
                return "column-parallel" if tensor.shape[0] < whole else "duplicated"
    return "duplicated"


def _vocab_rows(config: ModelConfig, sizes: Sizes, file: RankFile) -> int:
    """Rows of the padded embedding, by the shape of the first rank's share."""
    embedding = file.weights.get(EMBEDDING)
    rows = embedding.shape[0] * sizes.tensor if embedding and embedding.shape else 0
    # Too few rows are reported later, when all shapes are compared.
    return rows if rows >= config.vocab_size else padded_size(config.vocab_size, sizes.tensor)
