"""How errors name a value: by its option if that was given, else by the default or preset."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def given_options(argv: Iterable[str]) -> frozenset[str]:
    """The options on a command line, which must not be abbreviated."""
    return frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))


def name_of(args: argparse.Namespace, flag: str) -> str:
    """``"--num-layers"``, or ``"num_layers of the preset tiny"`` if it is not on the command line.

    Args:
        args: With ``given``, the options on the command line.
        flag: An option of the model.
    """
    if flag in args.given:
        return flag
    plain = flag.removeprefix("--").replace("-", "_")
    if args.use_checkpoint_args:
        return f"{plain} of the checkpoint in --load"
    return f"{plain} of the preset {args.preset}"


def own_name_of(args: argparse.Namespace, flag: str) -> str:
    """``"--seq-length"``, or ``"the default seq_length"``."""
    plain = flag.removeprefix("--").replace("-", "_")
    return flag if flag in args.given else f"the default {plain}"


def value_of(args: argparse.Namespace, flag: str) -> str:
    """``"--micro-batch-size 8"``, or ``"the default micro_batch_size 8"``."""
    value = getattr(args, flag.removeprefix("--").replace("-", "_"))
    return f"{own_name_of(args, flag)} {value}"
