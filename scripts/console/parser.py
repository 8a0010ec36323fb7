"""Parser of every script: a mistake is a ValueError, and ``--help`` shows every default."""

from __future__ import annotations

import argparse
from typing import IO, NoReturn

from console.ranks import rank


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that does not accept abbreviated options.

    Args:
        script: Name of the program.
        description: Text before the options in ``--help``; its line breaks are kept.
        epilog: Text after the options, likewise.
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
        """Raise an error, so that it is reported like other mistakes of the user.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"{message} (--help lists all options)")

    def print_help(self, file: IO[str] | None = None) -> None:
        """Print the help on rank 0 only."""
        if not rank():
            super().print_help(file)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of every option whose text does not contain it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = "default:" in text or action.required or action.default is argparse.SUPPRESS
        if shown or not action.option_strings:
            return text
        if action.nargs == 0:
            switched_on = True if action.const is None else action.const
            return f"{text} (default: {'on' if action.default == switched_on else 'off'})"
        # Not "none": an empty list is a value.
        return f"{text} (default: {'none' if action.default is None else '%(default)s'})"
