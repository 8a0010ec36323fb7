"""What a distributed checkpoint holds beside its tensors: arguments, iteration, modules' states.

Megatron-Core 0.19 keeps the common state as an object of the checkpoint, earlier releases in a file
of its own, ``common.pt``. What is written has both: 0.19 takes the file where there is one.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path

import torch

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.pt_file import open_pt
from checkpoint_conversion.formats.torch_dist_names import EXTRA_STATE
from checkpoint_conversion.formats.torch_dist_storage import Storage
from checkpoint_conversion.safe_paths import file_inside, read_json

COMMON_STATE = "common_state/shard_0_1"
BACKEND_FILE = "metadata.json"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FILE = "common.pt"
# What modules keep without FP8 takes up to 1513 bytes, of which nearly all is torch.save's.
_EMPTY_STATE = 2048


def check_backend(folder: Path, follow_links: bool) -> None:
    """Check that Megatron wrote the checkpoint in ``folder``, in this format.

    Raises:
        CheckpointError: If not.
    """
    if not (folder / BACKEND_FILE).exists():
        raise CheckpointError(
            f"{folder} has no {BACKEND_FILE}: it is a checkpoint of torch.distributed.checkpoint, "
            "but not one that Megatron has finished"
        )
    found = read_json(file_inside(folder, BACKEND_FILE, follow_links=follow_links))
    if any(found.get(key) != value for key, value in BACKEND.items()):
        raise CheckpointError(
            f"{folder / BACKEND_FILE} says {str(found)[:200]}; only "
            f"{BACKEND['sharded_backend']} of version {BACKEND['sharded_backend_version']} is known"
        )


def read_common_state(
    folder: Path, storage: Storage, follow_links: bool = False
) -> Mapping[str, object]:
    """The common state: ``args``, ``iteration`` and more; empty if there is none.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if (folder / _COMMON_FILE).exists():
        content = open_pt(file_inside(folder, _COMMON_FILE, follow_links=follow_links)).content
    elif COMMON_STATE in storage.objects:
        content = open_pt(storage.object(COMMON_STATE)).content
        # One for each shard of the object.
        content = content[0] if isinstance(content, list) and len(content) == 1 else None
    else:
        return {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: the common state is no dict")
    return content


def arguments(common: Mapping[str, object]) -> Mapping[str, object]:
    """The arguments of the training that saved a checkpoint; empty if it holds none."""
    args = common.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def iteration(common: Mapping[str, object]) -> int | None:
    """The iteration of a checkpoint; None of a release."""
    number = common.get("iteration")
    return number if type(number) is int and number > 0 else None


def states_in_use(storage: Storage) -> dict[str, int]:
    """States of modules that hold something: name -> bytes."""
    states = {name: storage.nbytes(name) for name in storage.objects if is_extra_state(name)}
    return {name: nbytes for name, nbytes in states.items() if nbytes > _EMPTY_STATE}


def is_extra_state(name: str) -> bool:
    """Whether an object is the state of a module."""
    return f"{EXTRA_STATE}/shard_" in name


def write_common_file(folder: Path, common: Mapping[str, object]) -> None:
    """Write the common state as Megatron-Core 0.18 and earlier load it."""
    torch.save(dict(common), folder / _COMMON_FILE)


def saved(value: object) -> bytes:
    """An object as Megatron stores it: the list of what one rank has of it."""
    buffer = io.BytesIO()
    torch.save([value], buffer)
    return buffer.getvalue()
