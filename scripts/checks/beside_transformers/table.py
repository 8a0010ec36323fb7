"""The table of docs/measurements/accuracy.md with whole models beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kit.tables import markdown_table

FILE = Path("accuracy") / "llm.json"
_NONE = "Not measured yet."
# Whether TransformerEngine is there, and whether steps are CUDA graphs.
_WAYS = {
    "local": (False, False),
    "local, graphs": (False, True),
    "TransformerEngine": (True, False),
    "TransformerEngine, graphs": (True, True),
}


def table(docs: Path) -> str:
    """One line for each model: the worst over alone, together, and with a prefix cache."""
    if not (docs / FILE).exists():
        return _NONE
    rows = json.loads((docs / FILE).read_text())["rows"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        bf16 = [row for row in own if row["dtype"] == "bfloat16"]
        ways = [_figures([row for row in bf16 if _way(row) == way]) for way in _WAYS.values()]
        fp32 = _figures([row for row in own if row["dtype"] == "float32"])
        theirs = [row["transformers_bf16"] for row in bf16]
        same = [f"{min(x['same_choice'] for x in some):.3f}" for some in (bf16, theirs)]
        lines.append([model, *ways, _figures(theirs), *same, fp32])
    head = ["model", *_WAYS, "transformers", "same tokens", "transformers'", "fp32"]
    return markdown_table(head, lines, ["model"])


def _way(row: dict) -> tuple[bool, bool]:
    return row["transformer_engine"], row["graphs"]


def _figures(rows: Sequence[dict]) -> str:
    """The largest difference and the largest root of a mean square."""
    if not rows:
        return "-"
    return " / ".join(f"{max(row[name] for row in rows):.1e}" for name in ("worst", "rms"))
