"""Plot of rewards and log-probability gaps."""

from __future__ import annotations

from pathlib import Path

from training.metrics import series


def plot_rollouts(records: list[dict], path: str | Path, reward: str) -> None:
    """Draw reward and log-probability gap of every step.

    Args:
        records: Of the metrics file.
        path: PNG to write.
        reward: Name of the reward.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    mean, deviation = series(records, "reward"), series(records, "reward_deviation")
    steps = list(mean)
    above.plot(steps, list(mean.values()), label="mean")
    above.fill_between(
        steps,
        [mean[step] - deviation[step] for step in steps],
        [mean[step] + deviation[step] for step in steps],
        alpha=0.2,
        label="one deviation of the samples",
    )
    above.set_ylabel(f"reward: {reward}")
    above.legend()
    for name in ("max", "mean"):
        gaps = series(records, f"log_prob_gap_{name}")
        below.plot(list(gaps), list(gaps.values()), label=name)
    # In parity mode all gaps are 0, which a logarithmic scale cannot show.
    if any(record["log_prob_gap_max"] for record in records):
        below.set_yscale("log")
    below.set_ylabel("log-prob gap, rollout to trainer")
    below.set_xlabel("step")
    below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
