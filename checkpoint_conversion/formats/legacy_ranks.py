"""The grid of ranks that wrote a per-rank checkpoint, and the file of each rank.

    mp_rank_TT            one pipeline stage
    mp_rank_TT_PPP        several pipeline stages
    mp_rank_TT_EEE        one pipeline stage, several expert-parallel ranks
    mp_rank_TT_PPP_EEE    both

The second and the third cannot be told apart by the folder's name: the training's arguments decide.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE, RANK_FOLDER, shown_name
from checkpoint_conversion.config_fields import Fields, shown
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pt_file import PtFile, StoredTensor, open_pt
from checkpoint_conversion.source import Source

# A damaged file may claim any number.
_MOST_RANKS = 1 << 16
# Of a rank that holds several model chunks (interleaved pipeline).
_VIRTUAL_PIPELINE = (
    "virtual_pipeline_model_parallel_size above 1 is not supported; save a distributed checkpoint "
    "(--ckpt-format torch_dist) instead"
)


@dataclass(frozen=True, order=True)
class Rank:
    """A position in the grid of ranks that write files; all others hold copies."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0


@dataclass(frozen=True)
class Sizes:
    """Tensor-, pipeline- and expert-parallel sizes of the grid."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def folder(self, rank: Rank) -> str:
        """Name of the folder of a rank's file."""
        name = f"mp_rank_{rank.tensor:02d}"
        if self.pipeline > 1:
            name += f"_{rank.pipeline:03d}"
        return f"{name}_{rank.expert:03d}" if self.expert > 1 else name

    def ranks(self) -> list[Rank]:
        """All ranks."""
        grid = itertools.product(range(self.tensor), range(self.pipeline), range(self.expert))
        return [Rank(*position) for position in grid]


def sizes_of(args: Mapping[str, object], folders: Iterable[str]) -> Sizes:
    """The sizes that the training's arguments give; without arguments, what folder names suggest.

    Args:
        args: The training's arguments, from any rank's file; empty if there are none.
        folders: Names of the rank folders.

    Raises:
        CheckpointError: If the arguments give sizes that are not supported.
    """
    if "tensor_model_parallel_size" not in args:
        return _sizes_from_names(folders)
    fields = Fields(args, [])
    names = [f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert")]
    sizes = Sizes(*(fields.integer(name, _MOST_RANKS, default=1) for name in names))
    for name in names:
        if fields.null(name):
            fields.wrong(name, f"an integer from 1 to {_MOST_RANKS}")
    if fields.given("num_experts"):
        accepted = f"tensor_model_parallel_size, {sizes.tensor}"
        fields.only("expert_tensor_parallel_size", sizes.tensor, accepted)
    virtual = fields.raw("virtual_pipeline_model_parallel_size")
    if virtual not in (None, 1):
        fields.problems.append(f"{_VIRTUAL_PIPELINE} (it is {shown(virtual)})")
    if sizes.tensor * sizes.pipeline * sizes.expert > _MOST_RANKS:
        fields.problems.append(f"{describe(sizes)} are more than {_MOST_RANKS}")
    fields.raise_problems("The checkpoint's args cannot be converted:")
    return sizes


def folder_problems(folders: Iterable[str], sizes: Sizes) -> list[str]:
    """Rank folders that are missing, and folders that belong to no rank; one line each."""
    there, wanted = set(folders), {sizes.folder(rank) for rank in sizes.ranks()}
    return [f"{name}/{RANK_FILE} is missing" for name in sorted(wanted - there)] + [
        f"{name} belongs to no rank of {describe(sizes)}" for name in sorted(there - wanted)
    ]


def describe(sizes: Sizes) -> str:
    """The grid in words."""
    parts = [f"{sizes.tensor} tensor-parallel", f"{sizes.pipeline} pipeline"]
    if sizes.expert > 1:
        parts.append(f"{sizes.expert} expert-parallel")
    return " x ".join(parts) + " ranks"


def _sizes_from_names(folders: Iterable[str]) -> Sizes:
    matches = [match for match in map(RANK_FOLDER.fullmatch, folders) if match]
    groups = zip(*(match.groups() for match in matches))
    # A second number without a third is taken as the pipeline stage.
    return Sizes(*(1 + max(int(number or 0) for number in numbers) for numbers in groups))


@dataclass
class RankFile:
    """The content of one rank's ``model_optim_rng.pt``, without the values of tensors.

    Attributes:
        folder: Name of its folder.
        args: The training's arguments; empty if the file has none.
        iteration: Iteration that it was saved at; None if it does not say.
        weights: The weights by their names on the rank.
        left_alone: Everything that is no weight, with its size in bytes.
        problems: What cannot be read, one line each.
    """

    folder: str
    args: Mapping[str, object] = field(default_factory=dict)
    iteration: int | None = None
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    left_alone: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_rank_file(folder: Path, source: Source) -> RankFile:
    """Read the file in a rank's folder, without the values of tensors.

    Raises:
        CheckpointError: If it cannot be read, or does not hold a rank's model.
    """
    file = open_pt(source.file(folder / RANK_FILE))
    content = file.content
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path} holds no dict but a {type(content).__name__}")
    if "model0" in content:
        raise CheckpointError(f"{file.path}: {_VIRTUAL_PIPELINE}")
    model = content.get("model")
    if not isinstance(model, dict):
        keys = ", ".join(sorted(map(_shown_key, content))[:8])
        raise CheckpointError(f"{file.path} has no model; it holds {keys or 'nothing'}")
    result = RankFile(folder.name)
    if isinstance(content.get("args"), argparse.Namespace):
        result.args = vars(content["args"])
    if type(content.get("iteration")) is int:
        result.iteration = content["iteration"]
    for name, value in model.items():
        _add(result, file, name, value)
    for key, value in content.items():
        if key not in ("args", "checkpoint_version", "iteration", "model"):
            result.left_alone[_shown_key(key)] = _tensor_bytes(value)
    for path in folder.iterdir():
        if path.name != RANK_FILE:
            result.left_alone[path.name] = path.lstat().st_size
    return result


def _add(result: RankFile, file: PtFile, name: object, value: object) -> None:
    """Add one entry of the model's state dict to the weights, the rest or the problems."""
    if not isinstance(name, str) or _shown_key(name) != name:
        result.problems.append(f"{result.folder}: {_shown_key(name)} is no tensor's name")
    elif name.endswith("_extra_state"):
        # Without FP8 it is None or an empty tensor.
        if value is not None and not (isinstance(value, Tensor) and not value.numel()):
            result.left_alone[name] = _tensor_bytes(value)
    elif isinstance(value, Tensor):
        try:
            result.weights[name] = file.stored(value)
        except CheckpointError as error:
            result.problems.append(f"{result.folder}: {name} {error}")
    else:
        kind = getattr(value, "path", type(value).__name__)
        result.problems.append(f"{result.folder}: {name} is no tensor but a {kind}")


def _shown_key(key: object) -> str:
    return shown_name(key) if isinstance(key, str) else f"<{type(key).__name__}>"


def _tensor_bytes(content: object) -> int:
    """Bytes of all storages in nested containers, each counted once."""
    storages: dict[object, int] = {}
    seen: set[int] = set()
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[getattr(storage, "_checkpoint_offset", id(value))] = storage.nbytes()
        # Containers may contain themselves, or one container several times.
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return sum(storages.values())
