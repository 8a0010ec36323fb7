"""What was found, as Markdown and as a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import provenance
from benchmark_report import markdown_table

from packed_gradients.row import Findings, LayerRow

NAME = "packed_gradients"

EXPLANATION = """\
- Errors are relative Frobenius norms against a float64 evaluation of MLA's equations in one process
  (`tests/oracle.py`), of the output, the input gradient and the gradient of every parameter. Bold:
  above three times what a plain evaluation of the same equations loses at this precision.
- **megatron**: Megatron-Core's `MLASelfAttention` of TransformerEngine's layers, whose attention is
  made to be cuDNN's. **ours**: `AbsorbedMLASelfAttention` with the backend that "auto" takes, and
  with `core_attention_backend="transformer_engine"`, which calls the same cuDNN. All have the same
  weights, input and output gradient.
- **The attention alone**: TransformerEngine's fused attention as our backend calls it, beside
  float64; `thd` is a pack of two documents."""


def json_name(findings: Findings) -> str:
    """Of the file of a run: runs with another cuDNN are kept beside it."""
    return f"{NAME}-cudnn-{cudnn(findings)}.json"


def cudnn(findings: Findings) -> str:
    """The version that TransformerEngine loaded."""
    return findings.environment["versions"][provenance.CUDNN_OF_TE]


def write(findings: Findings, folder: Path) -> Path:
    """The JSON of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / json_name(findings)
    path.write_text(json.dumps(findings.as_json(), indent=1) + "\n")
    return path


def read(path: Path) -> Findings:
    """The inverse of :func:`write`.

    Raises:
        ValueError: If the file is not one of this script's.
    """
    try:
        return Findings.from_json(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"--render must be JSON that this script wrote; {path}: {error!r}"
        ) from None


def markdown(runs: Sequence[Findings]) -> str:
    """The whole report, a section for each cuDNN."""
    parts = ["# Gradients of packs, by cuDNN", EXPLANATION]
    for run in runs:
        parts += [f"## cuDNN {cudnn(run)}", _measured(run), "### Layers", layer_table(run)]
        parts += ["### The attention alone", width_table(run)] if run.widths else []
        parts += [_failures(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def layer_table(run: Findings) -> str:
    """A line for each layer on each layout, a column for each tensor."""
    good = [row for row in run.layers if not row.error]
    tensors = list(dict.fromkeys(name for row in good for name in row.errors))
    words = ["layer", "layout", "ran"]
    head = [*words, *(_short(name) for name in tensors)]
    lines = [
        [row.implementation, row.layout, row.ran or "-", *(_cell(row, n) for n in tensors)]
        for row in good
    ]
    return markdown_table(head, lines, words)


def width_table(run: Findings) -> str:
    """A line for each pair of widths in each layout."""
    names = list(dict.fromkeys(name for row in run.widths for name in row.errors))
    lines = []
    for row in run.widths:
        found = [f"{row.errors[n]:.1e}" if n in row.errors else "-" for n in names]
        lines.append([str(row.key_width), str(row.value_width), row.layout, *found])
    return markdown_table(["key", "value", "layout", *names], lines, ["layout"])


def verdict(run: Findings) -> list[str]:
    """In words, a line for each implementation."""
    lines = [f"TransformerEngine runs cuDNN {cudnn(run)}."]
    for name in dict.fromkeys(row.implementation for row in run.layers):
        rows = [row for row in run.layers if row.implementation == name]
        bad = [row for row in rows if row.out_of_bounds]
        failed = [row for row in rows if row.error]
        good = [row for row in rows if not row.error and not row.out_of_bounds]
        parts = [f"within bounds on {_named(good)}"] if good else []
        for row in bad:
            worst = max(row.out_of_bounds, key=lambda n: row.errors[n] / row.bounds[n])
            parts.append(f"WRONG on {row.layout} ({worst}: {row.errors[worst]:.1e})")
        parts += [f"not run on {row.layout} ({row.error})" for row in failed]
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def ours_is_off(run: Findings) -> bool:
    """Whether any layer of ours is above its bound, or none of ours ran."""
    ours = [row for row in run.layers if row.implementation.startswith("ours")]
    return any(row.out_of_bounds for row in ours) or all(row.error for row in ours)


def _named(rows: Sequence[LayerRow]) -> str:
    return ", ".join(row.layout.replace("thd, ", "thd of ") for row in rows)


def _measured(run: Findings) -> str:
    about = run.environment
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    dims = ", ".join(f"{name} {size}" for name, size in about["dims"].items())
    return (
        f"Measured on {about['date']} by `{about['command']}` at {about['commit']}: "
        f"{about['device']}, {about['dtype']}; {about['tokens']} tokens, {about['heads']} heads, "
        f"{dims}; {versions}."
    )


def _failures(run: Findings) -> str:
    """What has no figures, with its reason; empty without any."""
    lines = [f"- {r.implementation}, {r.layout}: {r.error}" for r in run.layers if r.error]
    lines += [
        f"- attention alone, {r.key_width}/{r.value_width}, {r.layout}: {r.error}"
        for r in run.widths
        if r.error
    ]
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


def _short(name: str) -> str:
    """A parameter without what all have in common."""
    return name.replace(".weight", "").removeprefix("linear_")


def _cell(row: LayerRow, name: str) -> str:
    if name not in row.errors:
        return "-"
    text = f"{row.errors[name]:.1e}"
    return f"**{text}**" if name in row.out_of_bounds else text
