"""One rank's model_optim_rng.pt: its weights by name, and what else it holds."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.checkpoint_folder import RANK_FILE
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.legacy_names import EXTRA_STATE
from checkpoint_conversion.formats.legacy_ranks import virtual_pipeline_refusal
from checkpoint_conversion.formats.pt_file import PtFile, StoredTensor, open_pt
from checkpoint_conversion.safe_paths import file_inside, shown_name


@dataclass
class RankFile:
    """What a rank's file holds.

    Attributes:
        folder: Name of its folder.
        args: Of the training; empty if the file has none.
        iteration: That it was saved at; None if it does not say.
        weights: By their names in the rank's model.
        left_alone: What is no weight, with its bytes.
        problems: What cannot be read, one line each.
    """

    folder: str
    args: Mapping[str, object] = field(default_factory=dict)
    iteration: int | None = None
    weights: dict[str, StoredTensor] = field(default_factory=dict)
    left_alone: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_rank_file(root: Path, folder: Path, follow_links: bool) -> RankFile:
    """Read the file in a rank's folder, all but the values of tensors.

    Args:
        root: Of the checkpoint, a folder above.
        folder: The rank's.
        follow_links: Whether links may lead out of the root.

    Raises:
        CheckpointError: If it cannot be read, or is no rank's file.
    """
    name = (folder / RANK_FILE).relative_to(root).as_posix()
    file = open_pt(file_inside(root, name, follow_links=follow_links))
    content = file.content
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path} holds no dict but a {type(content).__name__}")
    if "model0" in content:
        raise CheckpointError(f"{file.path}: {virtual_pipeline_refusal()}")
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
    """Sort one entry of the model."""
    if not isinstance(name, str) or _shown_key(name) != name:
        result.problems.append(f"{result.folder}: {_shown_key(name)} is no tensor's name")
    elif name.endswith(EXTRA_STATE):
        # One that says nothing is None, or an empty tensor.
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
    """Bytes of the storages in nested containers."""
    storages: dict[object, int] = {}
    seen: set[int] = set()
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[getattr(storage, "_checkpoint_offset", id(value))] = storage.nbytes()
        # Containers may hold each other, or one of them many times.
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            left.extend(value.values() if isinstance(value, dict) else value)
    return sum(storages.values())
