"""What the command line accepts; nothing here needs torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from checkpoint_conversion import __version__
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import FORMATS, TARGETS, require_target
from checkpoint_conversion.target_flags import (
    add_target_flags,
    not_negative,
    positive,
    unfit_flags,
)

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
    """Says what is wrong in one line; commands' parsers are of the same class."""

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
    _add_exclude_mtp(parser)
    _add_reading(parser)
    _add_workers(parser)
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace DST, after success, if it is a checkpoint or empty; default: refuse a DST "
        "that exists",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted conversion, if there is one; default: start anew",
    )
    parser.add_argument(
        "--strict-values",
        action="store_true",
        help="refuse tensors that hold NaN or infinite values; default: convert and report them",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be written and write nothing; default: write it",
    )
    _add_json(parser)
    return parser


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "say in one screen what a checkpoint is")
    parser.add_argument("path", metavar="PATH", type=Path, help="folder of a checkpoint")
    _add_reading(parser)
    _add_json(parser)


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands, "verify", "compare two checkpoints, or one with the checksums in its manifest"
    )
    parser.add_argument("a", metavar="A", type=Path, help="folder of a checkpoint")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="folder of another one")
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="largest relative error of a tensor that is accepted (default 0: bit for bit)",
    )
    parser.add_argument(
        "--logits",
        action=argparse.BooleanOptionalAction,
        help="compare what the models predict; default: if both can be evaluated here",
    )
    parser.add_argument(
        "--logits-tolerance",
        type=not_negative,
        metavar="X",
        help="largest relative error of the logits that is accepted (default 1e-4)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="text for the logits; default: a built-in one"
    )
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="at most so many of it (default 512)"
    )
    _add_exclude_mtp(parser)
    _add_reading(parser)
    _add_workers(parser)
    _add_json(parser)


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
        "what the checkpoint says of itself",
    )
    parser.add_argument(
        "--follow-links",
        action="store_true",
        help="read through links that lead out of the folder, as in a download cache; default: "
        "refuse them",
    )


def _add_exclude_mtp(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exclude-mtp",
        action="store_true",
        help="leave out multi-token-prediction layers; default: keep them",
    )


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=positive, metavar="N", help="threads (default 4)")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document on stdout; default: text for people",
    )


def _target(to: str) -> str:
    try:
        return require_target(to)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _formats() -> str:
    lines = [f"  {name:<15} {what}" for name, what in FORMATS.items()]
    return "\n".join(["formats:", *lines, ""])
