"""What cases found, by family and by kernel, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kit.tables import shortened
from checks.fuzz.case import CaseId, Outcome
from checks.fuzz.family import Family

SCRIPT = "scripts/checks/fuzz_gpu.py"


def command_of(family: str, case: CaseId) -> str:
    """What repeats a case."""
    return f"python {SCRIPT} --only {family} --case {case}"


@dataclass
class _OfFamily:
    """Figures of a family's cases."""

    cases: int = 0
    configurations: set[int] = field(default_factory=set)
    failures: int = 0
    worst: float = 0.0
    seconds: float = 0.0


class Results:
    """Collects outcomes.

    Args:
        families: All that run.
        left_out: Names of families that cannot run here.
        about: Device, versions, seed, command.

    Attributes:
        failures: Family, case, command, configuration and error of each.
        unfinished: Cases that were under way when time was over.
    """

    def __init__(
        self, families: Mapping[str, Family], left_out: Iterable[str], about: dict
    ) -> None:
        self.families, self.left_out, self.about = families, list(left_out), about
        self.found = {name: _OfFamily() for name in families}
        self.kernels: Counter[str] = Counter()
        self.failed_kernels: Counter[str] = Counter()
        self.failures: list[dict] = []
        self.unfinished = 0

    @property
    def cases(self) -> int:
        """How many have ended."""
        return sum(each.cases for each in self.found.values())

    def add(self, family: str, case: CaseId, outcome: Outcome) -> dict | None:
        """One case; returns what is kept of a failure."""
        found = self.found[family]
        found.cases += 1
        found.configurations.add(case.configuration)
        found.worst = max(found.worst, outcome.worst)
        found.seconds += outcome.seconds
        self.kernels.update(outcome.launched)
        if outcome.error is None:
            return None
        found.failures += 1
        failure = {
            "family": family,
            "case": str(case),
            "command": command_of(family, case),
            "configuration": outcome.configuration,
            "error": shortened(outcome.error, 2000),
        }
        self.failures.append(failure)
        return failure

    def not_launched(self) -> list[str]:
        """Kernels that a family declares, and that no case has launched."""
        declared = {kernel for family in self.families.values() for kernel in family.kernels}
        return sorted(declared - set(self.kernels))

    def report(self, seconds: float) -> dict:
        """All of it."""
        return {
            **self.about,
            "seconds": round(seconds),
            "cases": self.cases,
            "unfinished": self.unfinished,
            "families": {
                name: {
                    "cases": each.cases,
                    "configurations": len(each.configurations),
                    "failures": each.failures,
                    "worst share of the tolerance": round(each.worst, 3),
                    "seconds": round(each.seconds),
                }
                for name, each in self.found.items()
            },
            "kernels": {
                kernel: self.kernels[kernel]
                for kernel in sorted({*self.kernels, *self.not_launched()})
            },
            "families of kernels": self._families_of_kernels(),
            "left out": self.left_out,
            "not launched": self.not_launched(),
            "failures": self.failures,
        }

    def _families_of_kernels(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for family in self.families.values():
            for kernel in family.kernels:
                found.setdefault(kernel, []).append(family.name)
        return dict(sorted(found.items()))


def write(report: dict, file: Path) -> None:
    """As JSON, which a reader never finds half written."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(file)


def failure_text(failure: dict) -> str:
    """A failure on three lines."""
    return (
        f"FAILED {failure['family']} {failure['configuration']}\n"
        f"  {failure['error'][:600]}\n  {failure['command']}"
    )
