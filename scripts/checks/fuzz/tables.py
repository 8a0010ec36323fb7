"""The results of ``fuzz_gpu.py --output`` as text, and the tables of measurements/gpu-fuzz.md."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.kit.tables import markdown_table, shortened

_NONE = "Not run yet."


def page(docs: Path) -> str:
    """What each file of the results says: where it comes from, failures, families, kernels."""
    files = sorted((docs / "gpu-fuzz").glob("*.json"))
    return "\n\n".join(rendered(json.loads(file.read_text())) for file in files) or _NONE


def rendered(report: dict) -> str:
    """All of a report."""
    parts = [summary(report), failure_list(report), family_table(report), kernel_table(report)]
    return "\n\n".join(filter(None, parts))


def family_table(report: dict) -> str:
    """Cases, configurations and failures of each family, in Markdown."""
    head = ["family", "cases", "configurations", "failures", "largest error / tolerance"]
    lines = [
        [
            f"`{name}`",
            str(each["cases"]),
            str(each["configurations"]),
            str(each["failures"]),
            f"{each['worst share of the tolerance']:.2f}",
        ]
        for name, each in report["families"].items()
    ]
    total = [str(sum(each[key] for each in report["families"].values())) for key in (
        "cases", "configurations", "failures"
    )]  # fmt: skip
    return markdown_table(head, [*lines, ["all", *total, ""]], ["family"])


def kernel_table(report: dict) -> str:
    """Cases that launched each kernel, and the families that declare it."""
    of = report["families of kernels"]
    lines = [
        [f"`{kernel.removeprefix('kernels.')}`", str(count), ", ".join(of.get(kernel, ["-"]))]
        for kernel, count in report["kernels"].items()
    ]
    return markdown_table(["kernel", "cases", "families"], lines, ["kernel", "families"])


def summary(report: dict) -> str:
    """Where the results come from, and how many cases failed, in a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    failures = len(report["failures"])
    return (
        f"{report['cases']:,} cases in {report['seconds']} s with seed {report['seed']} on "
        f"{report['device']} ({report['jobs']} processes; {versions}; {report['date']}, "
        f"{report['commit']}): {failures or 'no'} failure{'s' * (failures != 1)}."
    )


def failure_list(report: dict) -> str:
    """The command of each failure with what went wrong; empty without failures."""
    return "\n".join(
        f"- `{failure['command']}`: {shortened(failure['error'], 200)}"
        for failure in report["failures"]
    )
