"""The command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from checkpoint_conversion.checkpoint_folder import require_kind
from checkpoint_conversion.command_line import parse_arguments, target_options
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.target_folder import check_places, refuse_existing

# How checkpoints are read.
_HOW = ("hf_config", "follow_links", "drop_tokens")
DONE, DIFFERENT, REFUSED, FILE_SYSTEM, BUG, INTERRUPTED = 0, 1, 3, 4, 70, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command line without the program's name; None: the process's own.

    Returns:
        The exit code; ``--help`` lists them.
    """
    args = parse_arguments(argv)
    try:
        check_paths(args)
        return _COMMANDS[args.command](args)
    except BrokenPipeError:
        # The reader of the output (head, a pager) has exited. Prevents an error from Python's flush
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FILE_SYSTEM
    except CheckpointError as error:
        return _fail(args, error, REFUSED)
    except OSError as error:
        return _fail(args, error, FILE_SYSTEM)
    except KeyboardInterrupt as error:
        return _fail(args, error, INTERRUPTED)
    except ModuleNotFoundError as error:
        return _fail(args, error, REFUSED)
    except Exception as error:
        traceback.print_exc()
        return _fail(args, error, BUG)


def _convert(args: argparse.Namespace) -> int:
    from checkpoint_conversion.convert import convert
    from checkpoint_conversion.progress import reporter_for

    report = convert(
        args.source,
        args.target,
        args.to,
        target_options(args),
        reporter=reporter_for(),
        **_given(args, "force", "resume", "exclude_mtp", "workers", "strict_values", "dry_run"),
        **_given(args, *_HOW),
    )
    _print(args, report.as_json, report.lines)
    return DONE


def _inspect(args: argparse.Namespace) -> int:
    from checkpoint_conversion.inspection import inspect_checkpoint

    inspection = inspect_checkpoint(args.path, **_given(args, *_HOW))
    _print(args, inspection.as_json, inspection.lines)
    return REFUSED if inspection.problems else DONE


def _verify(args: argparse.Namespace) -> int:
    from checkpoint_conversion.progress import reporter_for
    from checkpoint_conversion.verify import verify

    report = verify(
        args.a,
        args.b,
        reporter=reporter_for(),
        **_given(args, "exclude_mtp", "tolerance", "logits", "text", "workers"),
        **_given(args, "logits_tolerance", "max_tokens", *_HOW),
    )
    _print(args, report.as_json, report.lines)
    return DONE if report.accepted else DIFFERENT


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options by name; those that are not given have their defaults in the functions."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


_COMMANDS = {"convert": _convert, "inspect": _inspect, "verify": _verify}


def _print(
    args: argparse.Namespace, as_json: Callable[[], dict], lines: Callable[[], Iterator[str]]
) -> None:
    if args.json:
        print(json.dumps(as_json()))
    else:
        for line in lines():
            print(_printable(line))


def _fail(args: argparse.Namespace, error: BaseException, code: int) -> int:
    """Print an error: text on stderr and, with ``--json``, a document on stdout."""
    message = _message(error)
    notes = getattr(error, "__notes__", [])
    for line in [f"error: {message}", *notes]:
        print(_printable(line), file=sys.stderr)
    if args.json:
        problems = getattr(error, "problems", ())
        document = {"message": message, "problems": problems, "notes": notes}
        print(json.dumps({"command": args.command, "exit_code": code, "error": document}))
    return code


def _message(error: BaseException) -> str:
    if isinstance(error, OSError):
        places = [str(place) for place in (error.filename, error.filename2) if place is not None]
        reason = error.strerror or str(error)
        return ": ".join([reason, *places])
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ModuleNotFoundError):
        install = "pip install 'absorbed-mla[conversion]' brings what a conversion needs"
        return f"{error.name} is not installed; {install}"
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}. This is a bug; please report it with the lines above"


def _printable(text: str) -> str:
    """Text with control characters escaped, so that names in files cannot control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def check_paths(args: argparse.Namespace) -> None:
    """Check the paths that a command will read and write, before torch is imported.

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
