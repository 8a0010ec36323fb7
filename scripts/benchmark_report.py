"""What the reports of all benchmarks have in common: a JSON file, a Markdown file and a plot."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self


class StoredReport:
    """One run of a benchmark, kept as JSON: its environment and a list of what was measured.

    A subclass is a dataclass of ``environment`` and that list.

    Attributes:
        entries: Name of the list, in the dataclass and in the file.
        entry: Type of what is in the list, with ``as_json`` and ``from_json``.
    """

    entries: ClassVar[str] = "rows"
    entry: ClassVar[Any]
    environment: dict

    def write(self, path: Path) -> None:
        """As JSON; either the whole file is there or the former one."""
        measured = [one.as_json() for one in getattr(self, self.entries)]
        content = {"environment": self.environment, self.entries: measured}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The inverse of :meth:`write`.

        Raises:
            ValueError: If the file is not one of this script's.
        """
        try:
            content = json.loads(path.read_text())
            measured = [cls.entry.from_json(one) for one in content[cls.entries]]
            return cls(content["environment"], measured)  # type: ignore[call-arg]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"--render must be JSON that this script wrote; {path}: {error!r}"
            ) from None


def publish(
    folder: Path,
    name: str,
    text: str,
    plot: Callable[[Path], bool],
    parts: Iterable[str],
    summary: str,
) -> None:
    """Write a report's Markdown and plot, and print it.

    Args:
        folder: Where they go; made if it is not there.
        name: Of the files, without suffix.
        text: The Markdown.
        plot: Draws into a file, or returns False.
        parts: What to print of it; empty ones are left out.
        summary: One line of JSON, printed last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    if not plot(folder / f"{name}.png"):
        print("No plot: matplotlib is missing, or nothing was measured.")
    for part in filter(None, parts):
        print(f"\n{part}")
    print(f"\nWritten to {folder}")
    print(summary)


def markdown_table(head: list[str], lines: Iterable[list[str]], words: Iterable[str]) -> str:
    """A table whose columns called ``words`` hold words; the others hold numbers."""
    left = set(words)
    align = ["---" if name in left else "---:" for name in head]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *lines])


def can_plot() -> bool:
    """Whether matplotlib is there."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """A PNG that is written at the end; gives its axes, an array [rows, columns].

    Args:
        path: The PNG.
        rows: Of axes.
        columns: Of axes.
        size: In inches, at 130 dots each.
    """
    import matplotlib

    # Before pyplot looks for a screen.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, grid = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    try:
        yield grid
        drawn.tight_layout()
        drawn.savefig(path, dpi=130)
    finally:
        pyplot.close(drawn)


if __name__ == "__main__":
    from console.script import no_script

    no_script(__file__, __doc__)
