"""Command lines of scripts/train.py, as it has them before any work."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training import arguments
from training.checkpoint import Start
from training.checks import validate_arguments


def resolved(line: str | list[str]) -> argparse.Namespace:
    """A command line with its model."""
    return arguments.parse_arguments(line.split() if isinstance(line, str) else line)


def checked(line: str | list[str], world_size: int = 1, tokens: int = 257) -> argparse.Namespace:
    """One that was checked, with the vocabulary of a tokenizer of so many tokens."""
    args = resolved(line)
    args.world_size = world_size
    validate_arguments(args)
    arguments.set_vocabulary(args, tokens)
    return args


def saved(line: str = "", **changes: object) -> argparse.Namespace:
    """The arguments in a checkpoint of a run with this command line."""
    args = checked(line)
    args.data_fingerprint = "data"
    return argparse.Namespace(**{**vars(args), **changes})


def start_of(line: str = "") -> Start:
    """A checkpoint that describes a model."""
    return Start(Path("there"), saved(line))


def resolved_from(
    there: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, line: str = ""
) -> argparse.Namespace:
    """A command line that takes the model of a checkpoint with these arguments."""
    monkeypatch.setattr("training.checkpoint.load_model_args", lambda folder: there)
    return resolved(f"--use-checkpoint-args --load there {line}")
