"""Every benchmark, by the name of its file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from benchmarks.kit import Benchmark

FOLDER = Path(__file__).resolve().parents[4] / "scripts/benchmarks"
DOCS = FOLDER.parents[1] / "docs" / "measurements"


def _registered() -> dict[str, type[Benchmark]]:
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        started = re.search(r"^    kit\.main\((\w+)\)$", path.read_text(), re.MULTILINE)
        if started:
            module = importlib.import_module(f"benchmarks.{path.stem}")
            found[path.stem] = getattr(module, started[1])
    return found


BENCHMARKS = _registered()
