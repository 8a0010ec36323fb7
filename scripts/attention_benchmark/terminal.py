"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from attention_benchmark.report import Report, tables

# Enough for the widest table where the output is no terminal.
_WIDTH = 170


def print_tables(reports: Sequence[Report]) -> None:
    """By rich, or with spaces where rich is missing."""
    for title, head, lines in tables(reports):
        if lines:
            try:
                _print_rich(title, head, lines)
            except ImportError:
                _print_plain(title, head, lines)


def _print_rich(title: str, head: list[str], lines: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    console = Console()
    Console(width=console.width if console.is_terminal else _WIDTH).print(table)


def _print_plain(title: str, head: list[str], lines: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    print(title)
    for line in (head, *lines):
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))
