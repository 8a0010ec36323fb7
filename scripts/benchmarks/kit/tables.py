"""Tables in Markdown, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def markdown_table(
    head: Sequence[str], lines: Iterable[Sequence[str]], words: Iterable[str] = ()
) -> str:
    """A table in Markdown.

    Args:
        head: Names of the columns.
        lines: Cells.
        words: Columns that hold words; the others hold numbers, which are set flush right.
    """
    left = set(words)
    align = ["---" if name in left else "---:" for name in head]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *lines])


def tokens_text(tokens: int) -> str:
    """``"16k"`` where that is exact."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def gibibytes(row: Any) -> dict[str, float]:
    """The memory of a row in GiB: of ``kept_bytes`` and ``peak_bytes``, where they are known."""
    sizes = {name: getattr(row, f"{name}_bytes", None) for name in ("kept", "peak")}
    return {f"{name}_gib": size / 2**30 for name, size in sizes.items() if size is not None}


def transfer(row: Any) -> dict[str, float]:
    """Milliseconds, GiB and GB/s of a :class:`TimedRow` that moves ``more["bytes"]``."""
    size, seconds = row.more["bytes"], row.times.median
    rate = {"gigabytes_per_second": size / seconds / 1e9}
    return {"ms": 1e3 * seconds, "gibibytes": size / 2**30, **rate}


def shortened(text: str, most: int = 300) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
