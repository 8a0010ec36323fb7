"""The plot of docs/measurements/performance.md: one bar per comparison, the peer at 1."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from checks.tables.comparisons import measured
from console.figure import figure

# By group, labels and ratios.
Groups = dict[str, list[tuple[str, float]]]
FASTER, SLOWER = "tab:blue", "tab:orange"
# Inches of a bar, and of what is above and below all bars.
_BAR, _MARGINS = 0.21, 0.9
_SIGNATURE = 8


def bars(docs: Path) -> Groups:
    """Rounded as the table rounds."""
    return {
        one.section.title: [(_label(row), round(row.ratio, 2)) for row in one.drawn]
        for one in measured(docs)
    }


def _label(row) -> str:
    return f"{row.work}  /  {row.peer}"


def draw(groups: Groups, path: Path) -> None:
    """The PNG keeps what was drawn, for :func:`drawn`."""
    places = list(_places(groups))
    height = _MARGINS + _BAR * places[-1][0]
    with figure(path, 1, 1, (10, height), description=described(groups)) as [[axes]]:
        most = max([1.0, *(ratio for _, _, ratio in places if ratio is not None)])
        for place, _, ratio in places:
            if ratio is not None:
                axes.barh(place, ratio, height=0.75, color=SLOWER if ratio > 1 else FASTER)
                axes.text(most + 0.03, place, f"{ratio:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=1.5)
        _name(axes, places)
        axes.set_xlim(0, most + 0.12)
        axes.set_ylim(places[-1][0] + 0.7, -1)
        axes.set_title("time of ours  /  time of the other; 1: equal", fontsize=11)
        axes.text(0.99, -0.4, "ours is faster", ha="right", va="center", fontsize=9, color=FASTER)
        axes.text(1.01, -0.4, "slower", ha="left", va="center", fontsize=9, color=SLOWER)


def _places(groups: Groups) -> Iterator[tuple[float, str, float | None]]:
    """Height, label and ratio of every line; a group's title has no ratio."""
    place = 0.0
    for title, rows in groups.items():
        place += 0.6
        yield place, title, None
        for label, ratio in rows:
            place += 1
            yield place, label, ratio
        place += 1


def _name(axes, places: list[tuple[float, str, float | None]]) -> None:
    axes.set_yticks([place for place, _, _ in places], [label for _, label, _ in places])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for text, (_, _, ratio) in zip(axes.get_yticklabels(), places):
        text.set_fontweight("bold" if ratio is None else "normal")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def described(groups: Groups) -> str:
    """What a plot shows, as its PNG keeps it."""
    return json.dumps(groups)


def drawn(path: Path) -> str:
    """What :func:`draw` kept in a PNG; empty without the file or the text."""
    content = path.read_bytes() if path.exists() else b""
    place = _SIGNATURE
    while place < len(content):
        length, kind = struct.unpack(">I4s", content[place : place + 8])
        key, _, text = content[place + 8 : place + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key == b"Description":
            return text.decode("latin-1")
        place += 12 + length
    return ""
