"""Measurements as JSON, as Markdown and in a few words."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attention_benchmark.cases import CoreCase, LayerCase, attention_flops
from attention_benchmark.row import Row
from benchmark_report import StoredReport, markdown_table
from context_parallel_benchmark.report import tokens_text
from context_parallel_benchmark.row import shortened

NAME = "attention"
# Of Megatron's layer with the same recomputation, that ours should reach; 1 % is the allocator's.
TIME_TARGET, KEPT_TARGET = 1.0, 1.01

EXPLANATION = f"""\
- **Layer**: one attention layer with its projections, batch 1, one GPU; **ours** is
  `AbsorbedMLASelfAttention`, **megatron** Megatron-Core's `MLASelfAttention` of TransformerEngine's
  layers. A thd pack holds documents of mixed lengths, the same for both.
- Times are medians of event-timed repetitions, which are queued without waiting between them.
- **kept**: allocated by forward and not freed before backward. **peak**: the most allocated during
  a step. Both beyond the weights, the input and the output gradient.
- **of megatron's**: divided by those of Megatron's layer with the same recomputation, on the same
  input in the same run. Targets are {TIME_TARGET:g} for the time of a step and {KEPT_TARGET:g} for
  kept memory.
- **Attention alone**: causal, one sequence, expanded (keys and values of every head) or absorbed
  (one latent for all). TFLOP/s count half of S^2 pairs; a pair counts 2 (key + value) operations
  in forward and 2 (3 key + 2 value) in backward, whatever a kernel computes again. Inputs and
  gradients are those of the interface: absorbed, ours takes content and rope apart as its layer
  has them, and gives gradients in the precision that it sums them in.
- GiB is 2^30 bytes, k in numbers of tokens 1024."""

LAYER_HEAD = ["layout", "S", "heads", "layer", "recompute", "ran", "forward", "step", "kept"]
LAYER_HEAD += ["peak", "of megatron's: forward", "step", "kept"]
CORE_HEAD = ["form", "S", "heads", "implementation", "forward", "backward"]
CORE_HEAD += ["forward TFLOP/s", "backward TFLOP/s", "both"]
_WORDS = ("layout", "layer", "recompute", "ran", "form", "implementation")


@dataclass(frozen=True)
class Report(StoredReport):
    """One run of the script.

    Attributes:
        environment: From ``machine.Bench.describe``.
        rows: In the order they were measured.
    """

    entry = Row
    environment: dict
    rows: list[Row]

    def measured(self, suite: str) -> list[Row]:
        """Rows of a suite with figures."""
        return [row for row in self.rows if row.suite == suite and row.forward is not None]

    def peer(self, row: Row) -> Row | None:
        """Megatron's layer on the same input with the same recomputation, if it was measured."""
        for other in self.measured("layer"):
            case = other.case
            assert isinstance(case, LayerCase) and isinstance(row.case, LayerCase)
            alike = case.recompute == row.case.recompute and case.input == row.case.input
            if alike and case.implementation == "megatron":
                return other
        return None

    def ratios(self, row: Row) -> dict[str, float]:
        """Of the peer's time of forward and step, and kept memory; what is known of them."""
        peer = self.peer(row)
        if peer is None or peer is row:
            return {}
        found = {}
        for name in ("forward", "step"):
            own, other = getattr(row, name), getattr(peer, name)
            if own and other:
                found[name] = own.median / other.median
        if row.kept_bytes and peer.kept_bytes:
            found["kept"] = row.kept_bytes / peer.kept_bytes
        return found

    def tflops(self, row: Row) -> dict[str, float]:
        """Of an attention alone: of forward, backward and both."""
        assert isinstance(row.case, CoreCase)
        forward, backward = attention_flops(row.case, self.environment["dims"])
        counts = {"forward": forward, "backward": backward, "step": forward + backward}
        times = {name: getattr(row, name) for name in counts}
        return {name: counts[name] / one.median / 1e12 for name, one in times.items() if one}


def markdown(reports: Sequence[Report]) -> str:
    """The whole report."""
    parts = ["# Attention on one GPU", *(_measured(report) for report in reports)]
    for title, head, lines in tables(reports):
        if lines:
            parts += [f"## {title}", markdown_table(head, lines, _WORDS)]
    parts += [targets(reports), errors(reports), f"![Time and memory]({NAME}.png)", EXPLANATION]
    return "\n\n".join(part for part in parts if part) + "\n"


def tables(reports: Sequence[Report]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head and lines of both tables; layers that are compared stand together."""
    layers = [_layer_line(r, report) for report in reports for r in _side_by_side(report)]
    cores = [_core_line(r, report) for report in reports for r in report.measured("core")]
    return [("Layer", LAYER_HEAD, layers), ("Attention alone", CORE_HEAD, cores)]


def targets(reports: Sequence[Report]) -> str:
    """Where ours reaches the targets, in a line each; empty without any."""
    lines = []
    for report in reports:
        for row in report.measured("layer"):
            ratios, case = report.ratios(row), row.case
            ours = isinstance(case, LayerCase) and case.implementation == "ours"
            if ours and "step" in ratios:
                kept = ratios.get("kept")
                met = ratios["step"] <= TIME_TARGET and (kept is None or kept <= KEPT_TARGET)
                memory = "-" if kept is None else f"{kept:.3f}"
                lines.append(
                    f"- {'met' if met else 'missed'}: {case}: step {ratios['step']:.3f}, "
                    f"kept {memory}"
                )
    head = f"Targets (step at most {TIME_TARGET:g}, kept at most {KEPT_TARGET:g} of megatron's):"
    return "\n".join([head, "", *lines]) if lines else ""


def errors(reports: Sequence[Report]) -> str:
    """What was not measured, by why; empty without any."""
    why: dict[str, list[str]] = defaultdict(list)
    for report in reports:
        for row in report.rows:
            if row.error:
                why[shortened(row.error)].append(str(row.case))
    lines = [f"- {error}: {_enumerated(names)}" for error, names in why.items()]
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


def summary(reports: Sequence[Report]) -> str:
    """The figures as one line of JSON."""
    content = []
    for report in reports:
        content.append(
            {
                "device": report.environment["device"],
                "commit": report.environment["commit"],
                "ceilings": _rounded(report.environment["ceilings"]),
                "layer": {str(r.case): _brief_layer(r, report) for r in report.measured("layer")},
                "core": {str(r.case): _rounded(report.tflops(r)) for r in report.measured("core")},
                "not_measured": sum(bool(row.error) for row in report.rows),
            }
        )
    return json.dumps(content)


def brief(row: Row, report: Report) -> str:
    """One row in a line, while the others are being measured."""
    if row.forward is None:
        return f"{row.case}: {shortened(row.error, 150)}"
    if row.suite == "core":
        words = [f"{name} {value:.0f} TFLOP/s" for name, value in report.tflops(row).items()]
    else:
        words = [f"{n} {getattr(row, n).median * 1e3:.2f} ms" for n in ("forward", "step")]
        words += [f"{name} {value:.3f} of megatron's" for name, value in report.ratios(row).items()]
    ran = f" ({row.ran})" if row.ran else ""
    return f"{row.case}{ran}: {', '.join(words)}"


def _enumerated(names: list[str], most: int = 4) -> str:
    more = f"; {len(names) - most} more" if len(names) > most else ""
    return "; ".join(names[:most]) + more


def _brief_layer(row: Row, report: Report) -> dict:
    assert row.step is not None
    times = {"step_ms": 1e3 * row.step.median}
    return _rounded(times | {f"{name}_ratio": x for name, x in report.ratios(row).items()})


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def _measured(report: Report) -> str:
    about = report.environment
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    dims = ", ".join(f"{name} {size}" for name, size in about["dims"].items())
    reached = about["ceilings"]
    return (
        f"Measured on {about['date']} by `{about['command']}` at {about['commit']}: "
        f"{about['device']}, {about['dtype']}; {dims}, {about['rope_type']}; form "
        f"{about['form']}, backend {about['backend']}; {versions}. The same device reached "
        f"{reached['matmul_tflops']:.0f} TFLOP/s in a matrix product (8192^3 in bfloat16 on a GPU) "
        f"and {reached['copy_tbps']:.2f} TB/s in a copy, read and written."
    )


def _side_by_side(report: Report) -> list[Row]:
    """Measured layers, by size and input; those that are compared follow each other."""

    def place(row: Row) -> tuple:
        case = row.case
        assert isinstance(case, LayerCase)
        return case.tokens, case.heads, case.layout, case.recompute, case.implementation

    return sorted(report.measured("layer"), key=place)


def _layer_line(row: Row, report: Report) -> list[str]:
    case = row.case
    assert isinstance(case, LayerCase)
    ratios = report.ratios(row)
    return [
        case.layout,
        tokens_text(case.tokens),
        str(case.heads),
        case.implementation,
        "mla_up_proj" if case.recompute else "-",
        row.ran or "-",
        _milliseconds(row, "forward"),
        _milliseconds(row, "step"),
        _gibibytes(row.kept_bytes),
        _gibibytes(row.peak_bytes),
        *(f"{ratios[name]:.3f}" if name in ratios else "-" for name in ("forward", "step", "kept")),
    ]


def _core_line(row: Row, report: Report) -> list[str]:
    case = row.case
    assert isinstance(case, CoreCase)
    found = report.tflops(row)
    return [
        case.form,
        tokens_text(case.tokens),
        str(case.heads),
        case.implementation,
        _milliseconds(row, "forward"),
        _milliseconds(row, "backward"),
        *(f"{found[name]:.0f}" if name in found else "-" for name in counted()),
    ]


def counted() -> Iterable[str]:
    """What :meth:`Report.tflops` counts."""
    return ("forward", "backward", "step")


def _milliseconds(row: Row, name: str) -> str:
    times = getattr(row, name)
    return "-" if times is None else f"{1e3 * times.median:.2f} ms"


def _gibibytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**30:.2f} GiB"
