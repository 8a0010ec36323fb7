"""Draw a figure and save it as a PNG; used by every script that plots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(
    path: str | Path,
    rows: int,
    columns: int,
    size: tuple[float, float],
    description: str = "",
    **options: Any,
) -> Iterator[Any]:
    """Yield the axes of a figure, an array [rows, columns]; the PNG is written at the end.

    Args:
        path: The PNG; its folder is created.
        rows: Number of axes from top to bottom.
        columns: Number of axes from left to right.
        size: Width and height in inches, at 130 dots per inch.
        description: Text that the PNG keeps beside the picture.
        options: More options of matplotlib's ``subplots``.
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
        kept = {"Description": description} if description else None
        drawn.savefig(path, dpi=130, format="png", metadata=kept)
    finally:
        pyplot.close(drawn)
