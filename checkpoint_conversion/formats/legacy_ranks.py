"""Which rank's file is which, and what of the model it holds: arithmetic of ranks, no files.

    mp_rank_TT            pipeline of one stage
    mp_rank_TT_PPP        several stages
    mp_rank_TT_EEE        one stage, several expert-parallel ranks
    mp_rank_TT_PPP_EEE    both

A folder's name alone does not tell the second from the third.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from checkpoint_conversion.checkpoint_folder import RANK_FILE, RANK_FOLDER
from checkpoint_conversion.config_fields import shown
from checkpoint_conversion.errors import CheckpointError

# More are a damaged file's.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, order=True)
class Rank:
    """A position in the grid of ranks that write files."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0


@dataclass(frozen=True)
class Sizes:
    """The grid's sizes."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def folder(self, rank: Rank) -> str:
        """The folder of a rank's file."""
        name = f"mp_rank_{rank.tensor:02d}"
        if self.pipeline > 1:
            name += f"_{rank.pipeline:03d}"
        return f"{name}_{rank.expert:03d}" if self.expert > 1 else name

    def ranks(self) -> list[Rank]:
        """All ranks."""
        grid = itertools.product(range(self.tensor), range(self.pipeline), range(self.expert))
        return [Rank(*position) for position in grid]


def sizes_of(args: Mapping[str, object], folders: Iterable[str]) -> Sizes:
    """The sizes that the training's arguments give, or else those that the folders' names suggest.

    Args:
        args: Of the training, from any rank's file; empty if there are none.
        folders: Names of the folders.

    Raises:
        CheckpointError: If the arguments give sizes that are not supported.
    """
    if "tensor_model_parallel_size" not in args:
        return _sizes_from_names(folders)
    problems: list[str] = []
    sizes = Sizes(
        _size(args, "tensor_model_parallel_size", problems),
        _size(args, "pipeline_model_parallel_size", problems),
        _size(args, "expert_model_parallel_size", problems),
    )
    expert_tensor = args.get("expert_tensor_parallel_size")
    if args.get("num_experts") is not None and expert_tensor not in (None, sizes.tensor):
        problems.append(
            f"expert_tensor_parallel_size={shown(expert_tensor)} is not supported; it must be "
            f"tensor_model_parallel_size, {sizes.tensor}"
        )
    virtual = args.get("virtual_pipeline_model_parallel_size")
    if virtual not in (None, 1):
        problems.append(f"{virtual_pipeline_refusal()} (it is {shown(virtual)})")
    if sizes.tensor * sizes.pipeline * sizes.expert > _MOST_RANKS:
        problems.append(f"{describe(sizes)} are more than {_MOST_RANKS}")
    if problems:
        raise CheckpointError("The checkpoint's args cannot be converted:", problems)
    return sizes


def virtual_pipeline_refusal() -> str:
    """What to say of a model that is in several chunks per rank."""
    return (
        "virtual_pipeline_model_parallel_size above 1 is not supported; save a distributed "
        "checkpoint (--ckpt-format torch_dist) instead"
    )


def folder_problems(folders: Iterable[str], sizes: Sizes) -> list[str]:
    """Folders that are missing or too many for a grid."""
    there, wanted = set(folders), {sizes.folder(rank) for rank in sizes.ranks()}
    return [f"{name}/{RANK_FILE} is missing" for name in sorted(wanted - there)] + [
        f"{name} belongs to no rank of {describe(sizes)}" for name in sorted(there - wanted)
    ]


def describe(sizes: Sizes) -> str:
    """For people."""
    parts = [f"{sizes.tensor} tensor-parallel", f"{sizes.pipeline} pipeline"]
    if sizes.expert > 1:
        parts.append(f"{sizes.expert} expert-parallel")
    return " x ".join(parts) + " ranks"


def even_stages(num_layers: int, stages: int) -> list[range]:
    """The layers of each pipeline stage, all stages alike.

    Raises:
        CheckpointError: If the layers do not divide.
    """
    if num_layers % stages:
        raise CheckpointError(
            f"--pipeline-model-parallel-size {stages} does not divide the model's "
            f"{num_layers} layers"
        )
    each = num_layers // stages
    return [range(start, start + each) for start in range(0, num_layers, each)]


def stages_of(counts: Iterable[int]) -> list[range]:
    """The layers of each pipeline stage, of how many each has."""
    ends = list(itertools.accumulate(counts))
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _size(args: Mapping[str, object], name: str, problems: list[str]) -> int:
    value = args.get(name, 1)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_RANKS:
        return value
    problems.append(f"{name} must be a positive number of ranks, got {shown(value)}")
    return 1


def _sizes_from_names(folders: Iterable[str]) -> Sizes:
    matches = [match for match in map(RANK_FOLDER.fullmatch, folders) if match]
    groups = zip(*(match.groups() for match in matches))
    # A second number without a third is taken for the stage's.
    return Sizes(*(1 + max(int(number or 0) for number in numbers) for numbers in groups))
