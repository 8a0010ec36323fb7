"""Prompts from the command line, a file or stdin."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts; a blank line is an empty one, lone surrogates stand for bytes that are no UTF-8.

    Raises:
        ValueError: If there is none.
        OSError: If a file cannot be read.
    """
    if args.prompt is not None:
        return [_text(os.fsencode(prompt)) for prompt in args.prompt]
    if args.prompt_file is not None:
        source, content = args.prompt_file, Path(args.prompt_file).read_bytes()
    else:
        if sys.stdin.isatty():
            print("prompts, one per line; Ctrl-D ends them:", file=sys.stderr, flush=True)
        source, content = "stdin", sys.stdin.buffer.read()
    if not content:
        raise ValueError(f"there is no prompt in {source}; --prompt or --prompt-file gives some")
    lines = content.removesuffix(b"\n").split(b"\n")
    return [_text(line.removesuffix(b"\r")) for line in lines]


def _text(prompt: bytes) -> str:
    return prompt.decode("utf-8", errors="surrogateescape")
