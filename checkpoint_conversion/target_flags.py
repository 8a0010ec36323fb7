"""The options of ``convert`` that decide how the target is written, and which formats have them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from checkpoint_conversion.formats import TARGETS

if TYPE_CHECKING:
    from checkpoint_conversion.formats.base import TargetOptions

_MEGATRON = ("megatron", "absorbed")
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
    """One option.

    Attributes:
        name: On the command line.
        field: Of ``TargetOptions``.
        formats: Of targets that can honour it.
        accepts: Choices, or what makes a value of the text.
        help: For people.
    """

    name: str
    field: str
    formats: tuple[str, ...]
    accepts: tuple[str, ...] | Callable[[str], int]
    help: str


FLAGS = (
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
    Flag(
        "--norms",
        "norms",
        _MEGATRON,
        ("fused", "separate"),
        "fused into the linear layers behind them (TransformerEngine), or modules of their own; "
        "default: fused for megatron, separate for absorbed",
    ),
    Flag(
        "--kv-up",
        "kv_up",
        ("megatron",),
        ("combined", "split"),
        "K and V up-projections in one tensor (default) or two",
    ),
    Flag(
        "--down",
        "down",
        ("megatron",),
        ("fused", "separate"),
        "Q and KV down-projections in one tensor or two (default)",
    ),
    Flag(
        "--layers",
        "layers",
        _MEGATRON,
        ("numbered", "stacked"),
        "a tensor per layer or one for all; default: what Megatron writes for the architecture",
    ),
    Flag(
        "--make-vocab-size-divisible-by",
        "vocab_multiple",
        _MEGATRON,
        positive,
        "pad the vocabulary with zeros to a multiple of this; default: no padding",
    ),
    Flag(
        "--iteration",
        "iteration",
        _MEGATRON,
        positive,
        "write the checkpoint of this iteration; default: a release",
    ),
    Flag(
        "--max-shard-size",
        "max_shard_bytes",
        TARGETS,
        byte_count,
        "bound on a file of several tensors, such as 5GB; default: what memory allows, which is "
        "never exceeded",
    ),
)


def add_target_flags(parser: argparse.ArgumentParser) -> None:
    """Make a parser know all of them; each is None if it is not given."""
    group = parser.add_argument_group("how the target is written")
    for flag in FLAGS:
        only = "" if flag.formats == TARGETS else f" [{', '.join(flag.formats)}]"
        if callable(flag.accepts):
            metavar = "SIZE" if flag.accepts is byte_count else "N"
            group.add_argument(
                flag.name,
                dest=flag.field,
                type=flag.accepts,
                metavar=metavar,
                help=flag.help + only,
            )
        else:
            group.add_argument(
                flag.name, dest=flag.field, choices=flag.accepts, help=flag.help + only
            )


def unfit_flags(args: argparse.Namespace) -> list[str]:
    """What is wrong with the flags of a command line: the target's format cannot honour them."""
    return [
        f"{flag.name} is for --to {' or '.join(flag.formats)}, not for {args.to}"
        for flag in FLAGS
        if args.to not in flag.formats and getattr(args, flag.field) is not None
    ]


def target_options(args: argparse.Namespace) -> TargetOptions:
    """What the flags of a command line ask for."""
    import torch

    from checkpoint_conversion.formats.base import TargetOptions

    fields = {flag.field: getattr(args, flag.field) for flag in FLAGS}
    given = {name: value for name, value in fields.items() if value is not None}
    if "dtype" in given:
        given["dtype"] = getattr(torch, _DTYPES[given["dtype"]])
    return TargetOptions(**given)
