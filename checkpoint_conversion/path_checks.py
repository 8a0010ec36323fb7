"""Checks of the paths on the command line, before torch is imported, which takes a second."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpoint_conversion.checkpoint_folder import require_kind
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.target_folder import check_places, refuse_existing


def check_paths(args: argparse.Namespace) -> None:
    """Check the paths that a command will read and write.

    Raises:
        CheckpointError: Naming the path and what is wrong with it.
    """
    if args.command == "convert":
        check_places(args.source, args.target)
        if not (args.force or args.resume):
            refuse_existing(args.target, False, lambda folder: None)
        require_kind(args.source)
    elif args.command == "inspect":
        require_kind(args.path)
    else:
        require_kind(args.a)
        if args.b is not None:
            require_kind(args.b)
        _check_file("--text", args.text)
    _check_file("--hf-config", args.hf_config)


def _check_file(option: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{option} {path} {what}; it must be a file")
