#!/usr/bin/env python3
"""Record a server's metrics under load, and draw the panels of its Grafana board from them.

    $ absorbed-mla-serve DeepSeek-V2-Lite
    $ python scripts/serving_board.py --output board.png

/metrics is read each second while clients come and go; then every panel of docs/grafana.json is
drawn from what its expressions are at each of these times, with a $__rate_interval of 5 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from console.figure import figure
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    from board.promql import Recording

BOARD = Path(__file__).resolve().parents[1] / "docs" / "grafana.json"
# Grafana's columns of a row.
_COLUMNS = 24
_UNITS = {"s": "seconds", "percentunit": "share", "reqps": "per second", "ops": "per second"}


def main(argv: list[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    return run_script("serving_board.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = parse_arguments(argv)
    require_writable(files={"--output": args.output})
    recording = asyncio.run(_record(args.url.rstrip("/"), args.api_key, args.seconds))
    draw(json.loads(args.board.read_text()), recording, args.output)
    print(f"{args.output}: {len(recording.times)} scrapes")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("serving_board.py", __doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server")
    add("--api-key", default="none", help="if the server asks for one")
    add("--seconds", type=float, default=60, metavar="N", help="for which clients send requests")
    add("--board", type=Path, default=BOARD, metavar="FILE", help="dashboard as Grafana exports it")
    add("--output", type=Path, required=True, metavar="PNG", help="picture")
    return parser.parse_args(argv)


async def _record(url: str, api_key: str, seconds: float) -> Recording:
    from board import load
    from board.promql import Recording

    recording, begin = Recording(), time.monotonic()
    headers = {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)

    def scrape() -> str:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode()

    # Before there is a client: a server that is not there is told at once.
    recording.add(0.0, scrape())
    clients = asyncio.create_task(load.run(url, api_key, seconds))
    while not clients.done():
        await asyncio.sleep(max(0.0, begin + len(recording.times) - time.monotonic()))
        text = await asyncio.to_thread(scrape)
        recording.add(time.monotonic() - begin, text)
    await clients
    return recording


def draw(board: dict[str, Any], recording: Recording, path: Path) -> None:
    """Draw every panel at its place.

    Args:
        board: As Grafana exports it; its panels have one size.
        recording: What they show.
        path: Of the PNG.
    """
    panels = board["panels"]
    width, height = panels[0]["gridPos"]["w"], panels[0]["gridPos"]["h"]
    rows, columns = 1 + max(one["gridPos"]["y"] for one in panels) // height, _COLUMNS // width
    with figure(path, rows, columns, (4.2 * columns, 2.5 * rows), board["title"]) as grid:
        for panel in panels:
            place = panel["gridPos"]
            axes = grid[place["y"] // height, place["x"] // width]
            for name, points in lines(panel, recording).items():
                axes.plot(*zip(*points), label=name, linewidth=1.2)
            unit = panel["fieldConfig"]["defaults"]["unit"]
            axes.set_title(panel["title"], fontsize=10, loc="left")
            axes.set_ylabel(_UNITS.get(unit, ""), fontsize=8)
            axes.set_xlim(0, recording.times[-1])
            # The legend's place.
            axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize=7, loc="upper left", ncols=4, frameon=False)
        for axes in grid[-1]:
            axes.set_xlabel("seconds", fontsize=8)


def lines(panel: dict[str, Any], recording: Recording) -> dict[str, list[tuple[float, float]]]:
    """Times and values of a panel's series, by their names in its legend."""
    found: dict[str, list[tuple[float, float]]] = {}
    for target in panel["targets"]:
        for at, now in enumerate(recording.times):
            for labels, value in recording.evaluate(target["expr"], at).items():
                name = target["legendFormat"]
                for label, shown in labels:
                    name = name.replace(f"{{{{{label}}}}}", shown)
                found.setdefault(name, []).append((now, value))
    return found


if __name__ == "__main__":
    leave(main())
