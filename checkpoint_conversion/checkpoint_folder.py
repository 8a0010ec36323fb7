"""The folder of an untrusted checkpoint: recognised by its file names, and read safely.

Nothing outside the folder is read, but for the files of a snapshot in the Hugging Face hub's cache.
Nothing here imports torch, so that a wrong path is reported at once.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from checkpoint_conversion.config_fields import shown
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.hub_cache import SNAPSHOTS, is_model_folder, is_own_blob

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
RANK_FILE = "model_optim_rng.pt"
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"
CONFIG = "config.json"
MANIFEST = "conversion_manifest.json"
# Kind of checkpoint -> the files that it is recognised by.
LOOKED_FOR = {
    "torch_dist": (
        f"{METADATA} and common.pt, in the folder or in the one that {TRACKER} names "
        "(megatron, absorbed)"
    ),
    "legacy": f"mp_rank_*/{RANK_FILE}, in the same places (megatron-legacy)",
    "hugging_face": f"{CONFIG} beside *{SUFFIX} (hf)",
}
_ADAPTER = "adapter_config.json"
# A name on the Hugging Face hub: OWNER/MODEL.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MOST_ADAPTER_BYTES = 1 << 20
# The index of a checkpoint of 150 000 tensors has 15 MB.
MAX_JSON_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20


def weights_folder(path: Path) -> Path:
    """The folder of a checkpoint's weights and manifest.

    Args:
        path: The checkpoint; for Megatron's, the folder of all iterations or of one of them.

    Raises:
        CheckpointError: If the tracker file does not name an iteration that exists.
    """
    tracker = path / TRACKER
    if not tracker.is_file():
        return path
    with tracker.open(errors="replace") as file:
        text = file.read(64).strip()
    # isdecimal alone would accept digits of other scripts.
    if text.isascii() and text.isdecimal():
        found = path / f"iter_{int(text):07d}"
    elif text == "release":
        found = path / text
    else:
        raise CheckpointError(
            f"{tracker} holds {shown(text)}; it must hold the number of an iteration, or release. "
            f"{_beside(path)}"
        )
    if not found.is_dir():
        raise CheckpointError(
            f"{tracker} says {shown(text)}, but there is no folder {found.name}. {_beside(path)}"
        )
    return found


def weights_of(folder: Path) -> Path | None:
    """The folder of a checkpoint's weights; None if ``folder`` is no complete checkpoint."""
    if kind_of(folder) is None:
        return None
    weights = weights_folder(folder)
    # A folder with stray weights among other files is no checkpoint.
    stray = any(folder.glob(f"*{SUFFIX}")) and not (folder / CONFIG).is_file()
    return None if stray else weights


def kind_of(path: Path) -> str | None:
    """The kind of checkpoint in a folder, a key of ``LOOKED_FOR``; None if there is none."""
    if not path.is_dir():
        return None
    weights = weights_folder(path)
    if (weights / METADATA).is_file():
        return "torch_dist"
    if rank_folders(weights):
        return "legacy"
    if (path / INDEX).is_file() or (path / f"model{SUFFIX}").is_file():
        return "hugging_face"
    others = any(path.glob(f"*{SUFFIX}")) and not (path / _ADAPTER).is_file()
    return "hugging_face" if others else None


def rank_folders(inner: Path) -> list[Path]:
    """Rank folders that hold a rank's file, sorted."""
    if not inner.is_dir():
        return []
    folders = [path for path in inner.iterdir() if RANK_FOLDER.fullmatch(path.name)]
    return sorted(path for path in folders if (path / RANK_FILE).is_file())


def require_kind(path: Path) -> str:
    """The kind of checkpoint at a path, a key of ``LOOKED_FOR``.

    Raises:
        CheckpointError: If there is no checkpoint, saying what is there instead.
    """
    kind = kind_of(path)
    if kind is not None:
        return kind
    if (path / _ADAPTER).is_file():
        raise CheckpointError(
            f"{path} is a PEFT adapter ({_ADAPTER}): changes to {_base_model(path)}, no model of "
            "its own. Merge it into that model first (PEFT: merge_and_unload(), then "
            "save_pretrained()) and convert the result"
        )
    if not path.exists() and _HUB_NAME.fullmatch(str(path)):
        raise CheckpointError(
            f"there is no folder {path}. If it is a model on the Hugging Face hub, download it "
            f"first: hf download {path} --local-dir {path.name}"
        )
    raise CheckpointError(f"{path} {_what_is_there(path)}. Looked for:", [*LOOKED_FOR.values()])


def _beside(path: Path) -> str:
    names = [p.name for p in path.iterdir() if p.is_dir() and p.name.startswith(("iter_", "rel"))]
    if not names:
        return "There are no folders of iterations beside it"
    shown_names = ", ".join(sorted(names)[-5:])
    return f"Beside it: {shown_names}; write one of them there, or give its folder as the path"


def _base_model(path: Path) -> str:
    file = path / _ADAPTER
    try:
        if file.stat().st_size > _MOST_ADAPTER_BYTES:
            return "another model"
        name = json.loads(file.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, RecursionError, AttributeError):
        name = None
    return shown(name) if isinstance(name, str) and name else "another model"


def _what_is_there(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if not path.is_dir():
        return "is a file; a checkpoint is a folder"
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "is empty"
    if is_model_folder(path):
        return f"is a model in the hub's cache; its checkpoints are the folders in {SNAPSHOTS}"
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"is no checkpoint of a known format; it holds {listed}"


def file_inside(folder: Path, name: str, *, follow_links: bool = False) -> Path:
    """The regular file that ``name`` means inside ``folder``.

    Args:
        folder: The checkpoint's folder.
        name: A path relative to it, from an index or a directory listing.
        follow_links: Whether links may lead out of the folder; ``..`` and absolute names never may.
            Those of a snapshot to the files of the same model in the hub's cache always may.

    Returns:
        The file's real path, with links resolved.

    Raises:
        CheckpointError: If there is no such file, it is not inside, or is not a regular file.
    """
    problem = name_problem(name)
    if problem:
        raise CheckpointError(f"{shown_name(name)} in {folder} {problem}")
    try:
        found = (folder / name).resolve(strict=True)
        home = folder.resolve(strict=True)
        if not (follow_links or found.is_relative_to(home) or is_own_blob(found, home)):
            raise CheckpointError(
                f"{name} in {folder} is a link out of the folder, to {found}; --follow-links "
                "(follow_links=True) allows it"
            )
        regular = stat.S_ISREG(found.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{name} in {folder} cannot be read: {error.strerror}") from error
    except RuntimeError as error:
        # Path.resolve raises this for a loop of links before Python 3.13.
        raise CheckpointError(f"{name} in {folder} is a link in a circle") from error
    if not regular:
        raise CheckpointError(f"{name} in {folder} is not a regular file")
    return found


def files_inside(folder: Path, *, follow_links: bool = False) -> dict[str, Path]:
    """Real paths of the files directly in ``folder``, by name, sorted.

    Folders in it are skipped; all else that :func:`file_inside` refuses is listed in one error.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    files, problems = {}, []
    for name in names:
        if os.path.isdir(folder / name):
            continue
        try:
            files[name] = file_inside(folder, name, follow_links=follow_links)
        except CheckpointError as error:
            problems.append(str(error))
    raise_problems(f"{folder} holds what cannot be read:", problems)
    return files


def name_problem(name: str) -> str | None:
    """What is wrong with a file name, as the predicate of a sentence; None if nothing."""
    if not name:
        return "is an empty name"
    # This refuses NUL, and surrogates that no file system can encode, too.
    if not name.isprintable():
        return "has characters that cannot be printed"
    path = PurePosixPath(name)
    if path.is_absolute():
        return "is an absolute path; files of a checkpoint are relative to its folder"
    if ".." in path.parts:
        return "leads out of the folder"
    return None


def shown_name(name: str) -> str:
    """An untrusted name, escaped and shortened for printing."""
    text = name if name and name.isprintable() else ascii(name)
    return text if len(text) <= 200 else f"{text[:197]}..."


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object that a JSON file of at most ``max_bytes`` holds.

    Raises:
        CheckpointError: If it cannot be read, is too large, not UTF-8, not JSON, nested too
            deeply, no object, or gives a name twice.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is larger than {max_bytes} bytes")
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    # Bad UTF-8, bad JSON, an integer of thousands of digits, a name that is there twice.
    except ValueError as error:
        raise CheckpointError(f"{path} is not acceptable JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{shown_name(name)} is there twice")
        result[name] = value
    return result
