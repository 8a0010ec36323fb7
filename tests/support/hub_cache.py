"""A model's folder as the Hugging Face hub's download cache holds it."""

import hashlib
import shutil
from pathlib import Path


def as_snapshot(source: Path, cache: Path, name: str = "tiny") -> Path:
    """A snapshot of a model's files, those in folders too: links to blobs of other names."""
    model = cache / f"models--owner--{name}"
    snapshot = model / "snapshots" / "0123abc"
    (model / "blobs").mkdir(parents=True)
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        inside = file.relative_to(source)
        blob = model / "blobs" / hashlib.sha256(str(inside).encode()).hexdigest()
        shutil.copyfile(file, blob)
        link = snapshot / inside
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(inside.parts) + 1), "blobs", blob.name))
    return snapshot
