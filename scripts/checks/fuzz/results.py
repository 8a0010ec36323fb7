"""What cases found, by family and by kernel: as JSON, and as the tables of gpu-fuzz.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.kit.tables import shortened
from checks.tables import table

if TYPE_CHECKING:
    from checks.fuzz.case import CaseId, Outcome
    from checks.fuzz.family import Family

SCRIPT = "scripts/checks/fuzz_gpu.py"
_NONE = "Not run yet."


@dataclass
class _OfFamily:
    """Figures of a family's cases."""

    cases: int = 0
    configurations: set[int] = field(default_factory=set)
    failures: int = 0
    worst: float = 0.0
    seconds: float = 0.0

    def report(self) -> dict[str, float]:
        return {
            "cases": self.cases,
            "configurations": len(self.configurations),
            "failures": self.failures,
            "worst share of the tolerance": round(self.worst, 3),
            "seconds": round(self.seconds),
        }


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
        self.failures: list[dict] = []
        self.unfinished = 0

    @property
    def cases(self) -> int:
        """How many have ended."""
        return sum(each.cases for each in self.found.values())

    def add(self, family: str, case: CaseId, outcome: Outcome) -> None:
        """One case."""
        found = self.found[family]
        found.cases += 1
        found.configurations.add(case.configuration)
        found.worst = max(found.worst, outcome.worst)
        found.seconds += outcome.seconds
        self.kernels.update(outcome.launched)
        if outcome.error is not None:
            found.failures += 1
            failure = {
                "family": family,
                "case": str(case),
                "command": f"python {SCRIPT} --only {family} --case {case}",
                "configuration": outcome.configuration,
                "error": shortened(outcome.error, 2000),
            }
            self.failures.append(failure)

    def not_launched(self) -> list[str]:
        """Kernels that a family declares, and that no case has launched."""
        declared = {kernel for family in self.families.values() for kernel in family.kernels}
        return sorted(declared - set(self.kernels))

    def report(self, seconds: float) -> dict:
        """All of it."""
        of_kernels: dict[str, list[str]] = {}
        for family in self.families.values():
            for kernel in family.kernels:
                of_kernels.setdefault(kernel, []).append(family.name)
        kernels = sorted({*self.kernels, *self.not_launched()})
        return {
            **self.about,
            "seconds": round(seconds),
            "cases": self.cases,
            "unfinished": self.unfinished,
            "families": {name: each.report() for name, each in self.found.items()},
            "kernels": {kernel: self.kernels[kernel] for kernel in kernels},
            "families of kernels": dict(sorted(of_kernels.items())),
            "left out": self.left_out,
            "not launched": self.not_launched(),
            "failures": self.failures,
        }


def page(docs: Path) -> str:
    """What each file of the results says: where it comes from, failures, families, kernels."""
    files = sorted((docs / "gpu-fuzz").glob("*.json"))
    return "\n\n".join(rendered(json.loads(file.read_text())) for file in files) or _NONE


def rendered(report: dict) -> str:
    """All of a report."""
    failures = "\n".join(
        f"- `{failure['command']}`: {shortened(failure['error'], 200)}"
        for failure in report["failures"]
    )
    parts = [summary(report), failures, family_table(report), _kernel_table(report)]
    return "\n\n".join(filter(None, parts))


def summary(report: dict) -> str:
    """Where the results come from, and how many cases failed, in a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    failures = len(report["failures"])
    return (
        f"{report['cases']:,} cases in {report['seconds']} s with seed {report['seed']} on "
        f"{report['device']} ({report['jobs']} processes; {versions}; {report['date']}, "
        f"{report['commit']}): {failures or 'no'} failure{'s' * (failures != 1)}."
    )


def family_table(report: dict) -> str:
    """Cases, configurations and failures of each family, in Markdown."""
    counts = ("cases", "configurations", "failures")
    worst = "largest error / tolerance"
    rows = [
        {
            "family": f"`{name}`",
            **{key: each[key] for key in counts},
            worst: f"{each['worst share of the tolerance']:.2f}",
        }
        for name, each in report["families"].items()
    ]
    total = {key: sum(row[key] for row in rows) for key in counts}
    columns: dict[str, Callable[[dict], str]] = {
        head: (lambda row, head=head: str(row.get(head, ""))) for head in rows[0]
    }
    return table([*rows, {"family": "all", **total}], columns, ["family"])


def _kernel_table(report: dict) -> str:
    """Cases that launched each kernel, and the families that declare it."""
    of = report["families of kernels"]
    columns: dict[str, Callable[[tuple], str]] = {
        "kernel": lambda row: f"`{row[0].removeprefix('kernels.')}`",
        "cases": lambda row: str(row[1]),
        "families": lambda row: ", ".join(of.get(row[0], ["-"])),
    }
    return table(report["kernels"].items(), columns, ["kernel", "families"])
