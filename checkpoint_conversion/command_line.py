"""Parser of the command line; it does not import torch, so that ``--help`` is quick.

The options of ``convert`` that decide how the target is written are one table, :func:`flags`.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from absorbed_mla.checkpoint.layout import layout_options
from absorbed_mla.registry import CHECKPOINT_LAYOUTS
from checkpoint_conversion import __version__
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import FORMATS, TARGETS, require_target

if TYPE_CHECKING:
    from checkpoint_conversion.formats.base import TargetOptions


_EXIT_CODES = """
exit codes:
  0    done; verify: no difference beyond the tolerances
  1    verify: the checkpoints differ
  2    wrong command line
  3    the checkpoint or the request was refused; inspect: the tensors do not fit the model
  4    the file system failed: disk full, no permission
  70   a bug of this tool
  130  interrupted; convert --resume continues
"""


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line; subcommands use the same class."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists all options)\n")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check a command line; exits with 2 if it is wrong, with 0 after ``--help``."""
    parser = _Parser(
        prog="absorbed-mla-convert",
        description="Convert DeepSeek-style checkpoints between Hugging Face, Megatron and the "
        "absorbed model, tensor by tensor.",
        epilog=_formats() + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    convert = _add_convert(commands)
    _add_inspect(commands)
    _add_verify(commands)
    args = parser.parse_args(argv)
    if args.command == "convert":
        unfit = unfit_flags(args)
        if unfit:
            convert.error("; ".join(unfit))
    return args


def _add_convert(commands: Any) -> argparse.ArgumentParser:
    parser = _command(commands, "convert", "write a checkpoint in another format")
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of a checkpoint")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to make")
    parser.add_argument(
        "--to",
        required=True,
        type=_target,
        metavar=f"{{{','.join(TARGETS)}}}",
        help="format of DST (required)",
    )
    add_target_flags(parser)
    _add_mtp_and_workers(parser)
    _add_reading(parser)
    _add_switches(
        parser,
        force="replace DST, after success, if it is a checkpoint or empty; default: refuse a DST "
        "that exists",
        resume="continue an interrupted conversion, if there is one; default: start anew",
        strict_values="refuse tensors that hold NaN or infinite values; default: convert and "
        "report them",
        dry_run="print what would be written and write nothing; default: write it",
    )
    return parser


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "say in one screen what a checkpoint is")
    parser.add_argument("path", metavar="PATH", type=Path, help="folder of a checkpoint")
    _add_reading(parser)


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands, "verify", "compare two checkpoints, or one with the checksums in its manifest"
    )
    parser.add_argument("a", metavar="A", type=Path, help="folder of a checkpoint")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="folder of another one")
    add, error = parser.add_argument, "largest relative error of {} that is accepted (default {})"
    number: dict[str, Any] = {"type": not_negative, "metavar": "X"}
    add("--tolerance", default=0.0, **number, help=error.format("a tensor", "0: bit for bit"))
    what = "compare what the models predict; default: if both can be evaluated here"
    add("--logits", action=argparse.BooleanOptionalAction, help=what)
    add("--logits-tolerance", **number, help=error.format("the logits", "1e-4"))
    add("--text", type=Path, metavar="FILE", help="text for the logits; default: a built-in one")
    add("--max-tokens", type=positive, metavar="N", help="at most so many of it (default 512)")
    _add_mtp_and_workers(parser)
    _add_reading(parser)


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=(_formats() if name == "convert" else "") + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json, for a Megatron checkpoint that does not hold it; default: "
        "the checkpoint's own arguments or config.json",
    )
    _add_switches(
        parser,
        drop_tokens="let --hf-config leave out tokens that a Megatron checkpoint has by its own "
        "config or arguments; default: refuse it",
        follow_links="read through links that lead out of the folder; default: refuse them, but "
        "for a snapshot's in the Hugging Face hub's cache",
        json="print one JSON document on stdout; default: text for people",
    )


def _add_switches(parser: argparse.ArgumentParser, **switches: str) -> None:
    for name, text in switches.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)


def _add_mtp_and_workers(parser: argparse.ArgumentParser) -> None:
    _add_switches(parser, exclude_mtp="leave out multi-token-prediction layers; default: keep them")
    parser.add_argument("--workers", type=positive, metavar="N", help="threads (default 4)")


def _target(to: str) -> str:
    try:
        return require_target(to)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _formats() -> str:
    lines = [f"  {name:<15} {what}" for name, what in FORMATS.items()]
    return "\n".join(["formats:", *lines, ""])


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
    accepts: tuple[str, ...] | Callable[[str], int | Path]
    help: str


# What the options do, by field; those of layouts say it themselves.
_HELP = {
    "dtype": "of all weights except the routing's correction bias and the indexers' weights_proj; "
    "default: each keeps its own, and quantised ones become bf16",
    "fp8": "quantise to FP8 blocks with such scales; default: do not",
    "quantised_like": "quantise the weights that this Hugging Face folder has in four bits (INT4, "
    "MXFP4) as it does; groups of equal values keep its bits; default: do not",
    "layers": "a tensor per layer or one for all; default: what Megatron writes for the "
    "architecture",
    "vocab_multiple": "pad the vocabulary with zeros to a multiple of this; default: no padding",
    "iteration": "write the checkpoint of this iteration; default: a release",
    "max_shard_bytes": "bound on a file of several tensors, such as 5GB; default: what memory "
    "allows, which is never exceeded",
}


def flags() -> list[Flag]:
    """The options of ``convert`` that decide how the target is written."""
    megatron, values = ("megatron", "absorbed"), layout_options()
    layouts = {one.option: one for one in CHECKPOINT_LAYOUTS}
    texts = _HELP | {name: one.help for name, one in layouts.items()}
    rows: list[tuple[Any, ...]] = [
        ("--dtype", "dtype", TARGETS, tuple(_DTYPES)),
        ("--fp8", "fp8", ("hf",), ("float", "ue8m0")),
        ("--quantised-like", "quantised_like", ("hf",), Path),
    ]
    for name, one in layouts.items():
        formats = megatron if one.in_absorbed else ("megatron",)
        rows.append((f"--{name.replace('_', '-')}", name, formats, values[name]))
    rows += [
        ("--layers", "layers", megatron, ("numbered", "stacked")),
        ("--make-vocab-size-divisible-by", "vocab_multiple", megatron, positive),
        ("--iteration", "iteration", megatron, positive),
        ("--max-shard-size", "max_shard_bytes", TARGETS, byte_count),
    ]
    return [Flag(*row, texts[row[1]]) for row in rows]


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
            metavar = {byte_count: "SIZE", Path: "DIR"}.get(flag.accepts, "N")
            accepts = {"type": flag.accepts, "metavar": metavar}
        group.add_argument(flag.name, dest=flag.field, help=flag.help + only, **accepts)


def unfit_flags(args: argparse.Namespace) -> list[str]:
    """Options that the target's format does not have, one line each."""
    return [
        f"{flag.name} is for --to {' or '.join(flag.formats)}, not for {args.to}"
        for flag in flags()
        if args.to not in flag.formats and getattr(args, flag.field) is not None
    ]
