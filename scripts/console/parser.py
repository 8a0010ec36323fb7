"""Command lines: a mistake is one line, and ``--help`` says what every option does by default."""

from __future__ import annotations

import argparse
from typing import IO, NoReturn

from console.ranks import rank


class Parser(argparse.ArgumentParser):
    """Takes whole option names only.

    Args:
        script: Name of the program.
        description: What ``--help`` begins with, printed as it is.
        epilog: What it ends with.
    """

    def __init__(self, script: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=script,
            description=description,
            epilog=epilog,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Report like every other error of the user's.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{message} (--help lists all options)")

    def print_help(self, file: IO[str] | None = None) -> None:
        """Once, not by every process."""
        if not rank():
            super().print_help(file)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Every option's help ends with its default, unless the text says "default:" itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = "default:" in text or action.required or action.default is argparse.SUPPRESS
        if shown or not action.option_strings:
            return text
        if action.nargs == 0:
            return f"{text} (default: {'on' if action.default else 'off'})"
        # Not "none": an empty list is a value.
        return f"{text} (default: {'none' if action.default is None else '%(default)s'})"
