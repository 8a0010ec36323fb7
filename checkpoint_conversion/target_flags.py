"""The options of ``convert`` that decide how the target is written, and which formats have them."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from absorbed_mla.checkpoint.layout import layout_options
from absorbed_mla.registry import CHECKPOINT_LAYOUTS
from checkpoint_conversion.formats import TARGETS

if TYPE_CHECKING:
    from checkpoint_conversion.formats.base import TargetOptions

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)}
_UNITS |= {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", start=1)}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def not_negative(text: str) -> float:
    """A number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return value


def byte_count(text: str) -> int:
    """A size such as ``5GB`` (powers of 1000) or ``512MiB`` (powers of 1024)."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) *([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 512MiB")
    return int(float(match[1]) * unit)


class Flag(NamedTuple):
    """One option of ``convert`` that decides how the target is written.

    Attributes:
        name: On the command line.
        field: Of ``TargetOptions``, or of its ``layout``.
        formats: Targets that have the option.
        accepts: Choices, or the function that makes a value of the text.
        help: For ``--help``.
    """

    name: str
    field: str
    formats: tuple[str, ...]
    accepts: tuple[str, ...] | Callable[[str], int]
    help: str


def flags() -> list[Flag]:
    """The options of ``convert`` that decide how the target is written."""
    layouts = layout_options()
    megatron = ("megatron", "absorbed")
    return [
        Flag(
            "--dtype",
            "dtype",
            TARGETS,
            tuple(_DTYPES),
            "of all weights except the routing's correction bias; default: each keeps its own, and "
            "FP8 becomes bf16",
        ),
        Flag(
            "--fp8",
            "fp8",
            ("hf",),
            ("float", "ue8m0"),
            "quantise to FP8 blocks with such scales; default: do not",
        ),
        *(
            Flag(
                f"--{one.option.replace('_', '-')}",
                one.option,
                megatron if one.in_absorbed else ("megatron",),
                layouts[one.option],
                one.help,
            )
            for one in {one.option: one for one in CHECKPOINT_LAYOUTS}.values()
        ),
        Flag(
            "--layers",
            "layers",
            megatron,
            ("numbered", "stacked"),
            "a tensor per layer or one for all; default: what Megatron writes for the architecture",
        ),
        Flag(
            "--make-vocab-size-divisible-by",
            "vocab_multiple",
            megatron,
            positive,
            "pad the vocabulary with zeros to a multiple of this; default: no padding",
        ),
        Flag(
            "--iteration",
            "iteration",
            megatron,
            positive,
            "write the checkpoint of this iteration; default: a release",
        ),
        Flag(
            "--max-shard-size",
            "max_shard_bytes",
            TARGETS,
            byte_count,
            "bound on a file of several tensors, such as 5GB; default: what memory allows, which "
            "is never exceeded",
        ),
    ]


def target_options(args: argparse.Namespace) -> TargetOptions:
    """The target's options of a command line."""
    import torch

    from checkpoint_conversion.formats.base import TargetOptions

    values = {flag.field: getattr(args, flag.field) for flag in flags()}
    given = {name: value for name, value in values.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, _DTYPES[given["dtype"]])
    known = {field.name for field in dataclasses.fields(TargetOptions)}
    layout = {name: value for name, value in given.items() if name not in known}
    return TargetOptions(
        **{name: value for name, value in given.items() if name in known}, layout=layout or None
    )


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Make a parser know the target's options; each is None if it is not given."""
    group = parser.add_argument_group("how the target is written")
    for flag in flags():
        only = "" if flag.formats == TARGETS else f" [{', '.join(flag.formats)}]"
        accepts: dict[str, Any] = {"choices": flag.accepts}
        if callable(flag.accepts):
            metavar = "SIZE" if flag.accepts is byte_count else "N"
            accepts = {"type": flag.accepts, "metavar": metavar}
        group.add_argument(flag.name, dest=flag.field, help=flag.help + only, **accepts)


def unfit_flags(args: argparse.Namespace) -> list[str]:
    """Options that the target's format does not have, one line each."""
    return [
        f"{flag.name} is for --to {' or '.join(flag.formats)}, not for {args.to}"
        for flag in flags()
        if args.to not in flag.formats and getattr(args, flag.field) is not None
    ]
