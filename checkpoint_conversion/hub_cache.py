"""The download cache of the Hugging Face hub, whose snapshots are folders of links.

models--OWNER--NAME/blobs/HASH                a file
models--OWNER--NAME/snapshots/REVISION/NAME   a link to it
"""

from __future__ import annotations

from pathlib import Path

SNAPSHOTS = "snapshots"
_BLOBS = "blobs"
_MODEL = "models--"


def is_model_folder(path: Path) -> bool:
    """Whether a folder is that of a model with all its snapshots."""
    return path.name.startswith(_MODEL) and (path / SNAPSHOTS).is_dir()


def is_own_blob(file: Path, folder: Path) -> bool:
    """Whether a file is one of the model that a folder is a snapshot of, in the hub's cache.

    Args:
        file: With links resolved, as the folder.
        folder: Of a snapshot, or inside one.
    """
    for snapshot in (folder, *folder.parents):
        model = snapshot.parent.parent
        if snapshot.parent.name == SNAPSHOTS and model.name.startswith(_MODEL):
            return file.is_relative_to(model / _BLOBS)
    return False
