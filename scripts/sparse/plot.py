"""Table and plot of recall and loss from the dense model to the sparse one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from console.figure import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rows_of(result: dict, stage: str) -> list[dict]:
    """The rows of a stage by iteration."""
    rows = [row for row in result["rows"] if row["stage"] == stage]
    return sorted(rows, key=lambda row: row["iteration"])


def table(result: dict) -> str:
    """Markdown: recall and losses at the beginning and the end of both stages."""
    warm, sparse = rows_of(result, "warm-up"), rows_of(result, "sparse")
    dense = rows_of(result, "continued")
    lines = [
        "| | recall | loss, sparse attention | loss, dense model |",
        "|---|---|---|---|",
        f"| random choice | {warm[0]['by_chance']:.3f} | | |",
    ]
    for name, row, recall, beside in (
        ("new indexer", warm[0], "recall_in_dense", dense[0]),
        ("after the warm-up", warm[-1], "recall_in_dense", dense[0]),
        ("after sparse training", sparse[-1], "recall_in_sparse", dense[-1]),
    ):
        losses = f"{row['sparse_loss']:.4f} | {beside['dense_loss']:.4f}"
        lines.append(f"| {name} | {row[recall]:.3f} | {losses} |")
    return "\n".join(lines)


def plot(result: dict, path: Path) -> None:
    """Draw recall and losses, the warm-up left of iteration 0; the PNG is written to ``path``."""
    sizes = result["settings"]
    with figure(path, 2, 1, (8, 7), sharex=True) as [[above], [below]]:
        _draw_recall(above, result)
        _draw_losses(below, result)
        above.set_title(
            f"A dense model becomes sparse: top-{sizes['topk']} of up to "
            f"{sizes['seq_length']} keys, held-out text"
        )
        for axes in (above, below):
            axes.axvspan(-sizes["warmup_iters"], 0, color="0.93", zorder=0)
            axes.grid(alpha=0.3)
            axes.legend()
        below.set_xlabel("iteration (left of 0: warm-up of the indexer, all else is frozen)")


def _draw_recall(axes: Axes, result: dict) -> None:
    warm, sparse = rows_of(result, "warm-up"), rows_of(result, "sparse")
    shift = result["settings"]["warmup_iters"]
    x = [row["iteration"] - shift for row in warm]
    axes.plot(x, [row["recall_in_dense"] for row in warm], "o-", label="warm-up")
    x = [row["iteration"] for row in sparse]
    axes.plot(x, [row["recall_in_sparse"] for row in sparse], "s-", label="sparse training")
    axes.axhline(warm[0]["by_chance"], color="0.4", linestyle="--", label="random choice")
    axes.set_ylim(0, 1)
    axes.set_ylabel("recall of the top-k")


def _draw_losses(axes: Axes, result: dict) -> None:
    from matplotlib.ticker import LogLocator

    shift = result["settings"]["warmup_iters"]
    warm, sparse = rows_of(result, "warm-up"), rows_of(result, "sparse")
    dense = rows_of(result, "continued")
    x = [row["iteration"] - shift for row in warm]
    label = "frozen model, attention over the indexer's choice"
    axes.plot(x, [row["sparse_loss"] for row in warm], "o-", label=label)
    x = [row["iteration"] for row in sparse]
    axes.plot(x, [row["sparse_loss"] for row in sparse], "s-", label="sparse training")
    x = [-shift, *(row["iteration"] for row in dense)]
    y = [dense[0]["dense_loss"], *(row["dense_loss"] for row in dense)]
    axes.plot(x, y, "x--", color="C2", label="dense model, same batches")
    axes.set_yscale("log", subs=())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("loss per token (nats)")
