"""Merging the tensors of all ranks' files into whole tensors of the model, with strict checks."""

from __future__ import annotations

from collections.abc import Mapping

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy_names import (
    as_mapped,
    is_grouped_mlp,
    layer_count,
    mtp_layer_count,
    split_grouped_mlp,
)
from checkpoint_conversion.formats.legacy_ranks import Rank, RankFile, Sizes, stages_of
from checkpoint_conversion.formats.legacy_sharding import EMBEDDING, Sharding, Share
from checkpoint_conversion.layouts import KV_DOWN, QKV_DOWN, MegatronLayout, padded_size
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.mapping import check_complete
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.tensor_parallel import same_values

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
