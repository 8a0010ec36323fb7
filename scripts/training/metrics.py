"""JSON lines of a run, kept consistent when the run is resumed."""

from __future__ import annotations

import json
from pathlib import Path


def read_metrics(path: str | Path) -> list[dict]:
    """Records of a metrics file; a last line that was cut off is left out.

    Raises:
        ValueError: If another line is no JSON object.
    """
    records = []
    lines = Path(path).read_text().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("iteration"), int):
            records.append(record)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number} is no metrics record: {line[:80]!r}")
    return records


class MetricsFile:
    """Writes one JSON object per line, flushed at once.

    Args:
        path: The file; None keeps the records in memory only.
        resumed_at: Iterations already done. Records up to there are kept, later ones belong to
            iterations that are about to run again.
    """

    def __init__(self, path: str | None, resumed_at: int) -> None:
        self.records: list[dict] = []
        self._file = None
        if path is None:
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if resumed_at and target.exists():
            self.records = [r for r in read_metrics(target) if r["iteration"] <= resumed_at]
        rewritten = target.with_name(f".{target.name}")
        rewritten.write_text("".join(json.dumps(r) + "\n" for r in self.records))
        rewritten.replace(target)
        self._file = target.open("a")

    def write(self, **record: float) -> None:
        """Append a record; ``iteration`` counts finished iterations."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def series(records: list[dict], key: str) -> dict[int, float]:
    """``key`` by iteration."""
    return {r["iteration"]: r[key] for r in records if key in r}
