"""Draw a figure into a PNG; used by every script that plots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(
    path: str | Path, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """A PNG that is written at the end of the block; gives its axes, an array [rows, columns].

    Args:
        path: The PNG; its folder is made.
        rows: Of axes.
        columns: Of axes.
        size: In inches, at 130 dots each.
        options: Of matplotlib's ``subplots``.
    """
    import matplotlib

    # Before pyplot looks for a screen.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **options)
    try:
        yield grid
        drawn.tight_layout()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=130, format="png")
    finally:
        pyplot.close(drawn)
