"""The worst error of every combination, one JSON object per line.

Written by rank 0 to the file that ``ABSORBED_MLA_ERROR_TABLE`` names (appended to, so that runs at
several sizes add up), else to ``absorbed_mla_errors/errors.jsonl`` in pytest's cache.
"""

import json
import os
from pathlib import Path

from tests.support import world
from tests.support.numerics import Deviation

VARIABLE = "ABSORBED_MLA_ERROR_TABLE"


class ErrorTable:
    """Collects rows and appends them to the file as they come."""

    def __init__(self, fallback: Path) -> None:
        self.path = Path(os.environ.get(VARIABLE, fallback))
        self.rows: list[dict[str, object]] = []

    def add(self, combination: dict[str, object], deviation: Deviation) -> None:
        """Record the tensor that came closest to its bound, if this is rank 0."""
        if world.rank():
            return
        name, error = deviation.worst()
        row = {
            "tensor_parallel": world.tp_size(),
            "context_parallel": world.cp_size(),
            "device": world.device().type,
            **combination,
            "worst_relative_error": error,
            "bound": deviation.bounds[name],
            "tensor": name,
        }
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def summary(self) -> list[str]:
        """One line per precision and rotary table: the worst of all its combinations."""
        worst: dict[tuple[str, str], dict[str, object]] = {}
        for row in self.rows:
            key = (str(row["dtype"]), str(row["rotary_table"]))
            if key not in worst or row["worst_relative_error"] > worst[key]["worst_relative_error"]:
                worst[key] = row
        return [
            f"{dtype}, {table} rotary table: {row['worst_relative_error']:.2e} ({row['tensor']}; "
            f"bound {row['bound']:.2e})"
            for (dtype, table), row in sorted(worst.items())
        ]
