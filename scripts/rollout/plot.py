"""Plot of rewards and log-probability gaps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from console.figure import figure
from training.metrics import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_rollouts(records: list[dict], path: str | Path, reward: str) -> None:
    """Draw reward and log-probability gap of every step.

    Args:
        records: Of the metrics file.
        path: PNG to write.
        reward: Name of the reward.
    """
    with figure(path, 2, 1, (8, 6), sharex=True) as [[above], [below]]:
        _draw(above, below, records, reward)


def _draw(above: Axes, below: Axes, records: list[dict], reward: str) -> None:
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
