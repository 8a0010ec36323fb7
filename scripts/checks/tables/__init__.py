"""Tables of README.md and docs/: of measured data, of options, of the registries."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.kit.report import Times
from benchmarks.kit.tables import markdown_table


def table(
    rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], words: Iterable[str] = ()
) -> str:
    """A table in Markdown, with a line for each row.

    ``columns`` has by a head what the column says of a row; ``words`` are the heads of columns
    that hold no numbers.
    """
    lines = ([cell(row) for cell in columns.values()] for row in rows)
    return markdown_table(list(columns), lines, words)


def by_input(
    rows: Iterable[Any],
    key: Callable[[Any], Hashable] = lambda row: row.case.input,
    name: Callable[[Any], str] = lambda row: row.case.implementation,
) -> list[dict[str, Any]]:
    """For every input, in the order of ``rows``, the rows by the implementation's name."""
    found: dict[Hashable, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        found[key(row)][name(row)] = row
    return list(found.values())


def recorded(path: Path) -> list[Any]:
    """The rows without errors in the file of a benchmark that is no more; times are ``Times``."""

    def read(content: dict) -> Any:
        return Times(**content) if "repetitions" in content else SimpleNamespace(**content)

    return without_errors(json.loads(path.read_text(), object_hook=read).rows)


def without_errors(rows: Iterable[Any]) -> list[Any]:
    """Those that have figures."""
    return [row for row in rows if not getattr(row, "error", "")]
