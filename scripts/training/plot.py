"""Loss curves as a PNG."""

from __future__ import annotations

from pathlib import Path

from training.metrics import series


def plot_losses(runs: dict[str, list[dict]], path: str | Path) -> None:
    """Draw training and validation losses of one or more runs.

    Args:
        runs: Metrics records by the run's name.
        path: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, (name, records) in enumerate(runs.items()):
        train, valid = series(records, "train_loss"), series(records, "valid_loss")
        color = f"C{number}"
        # The second run is drawn thin over the first: equal curves stay visible.
        width = 2.5 if number == 0 else 1.0
        axes.plot(list(train), list(train.values()), color=color, linewidth=width, label=name)
        if valid:
            label = f"{name}, validation"
            axes.plot(list(valid), list(valid.values()), "o--", color=color, label=label)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss per token (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
