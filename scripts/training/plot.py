"""Loss curves as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.metrics import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Below this the axis of differences is linear, so that 0 has a place on it.
_SMALLEST_DIFFERENCE = 1e-8


def plot_losses(
    runs: dict[str, list[dict]], path: str | Path, *, title: str = "Loss during training"
) -> None:
    """Draw training and validation losses of one or more runs; of two also their difference.

    Args:
        runs: Metrics records by the run's name.
        path: PNG to write.
        title: Stands above the curves.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if len(runs) == 2:
        figure, (losses, differences) = pyplot.subplots(
            2, sharex=True, figsize=(8, 7), height_ratios=(3, 1.4)
        )
        _draw_differences(differences, runs)
    else:
        figure, losses = pyplot.subplots(figsize=(8, 5))
    _draw_losses(losses, runs)
    losses.set_title(title)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.axes[-1].set_xlabel("iteration")
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _draw_losses(axes: Axes, runs: dict[str, list[dict]]) -> None:
    for number, (name, records) in enumerate(runs.items()):
        train, valid = series(records, "train_loss"), series(records, "valid_loss")
        color = f"C{number}"
        # The second run is drawn thin over the first: equal curves stay visible.
        first = number == 0
        width = 3.0 if first else 1.0
        axes.plot(list(train), list(train.values()), color=color, linewidth=width, label=name)
        if valid:
            style, size = ("o--", 9) if first else ("x:", 6)
            label = f"{name}, validation"
            x, y = list(valid), list(valid.values())
            axes.plot(x, y, style, color=color, markersize=size, label=label)
    axes.set_ylabel("loss per token (nats)")


def _draw_differences(axes: Axes, runs: dict[str, list[dict]]) -> None:
    left, right = runs.values()
    for key, label, style in (("train_loss", "training", "-"), ("valid_loss", "validation", "o--")):
        difference = absolute_differences(left, right, key)
        if difference:
            axes.plot(list(difference), list(difference.values()), style, color="C2", label=label)
    axes.set_yscale("symlog", linthresh=_SMALLEST_DIFFERENCE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("|difference| (nats)")
    axes.set_title("How far the two are apart", fontsize="medium")


def absolute_differences(left: list[dict], right: list[dict], key: str) -> dict[int, float]:
    """How far ``key`` is apart in two runs, for each iteration that both have."""
    first, second = series(left, key), series(right, key)
    return {i: abs(second[i] - first[i]) for i in sorted(first.keys() & second.keys())}
