"""Metrics file and plot of scripts/train.py."""

import pytest

from training.metrics import MetricsFile, absolute_differences, plot_losses, read_metrics, series

RUN = [{"iteration": i, "train_loss": 1 / i} for i in range(1, 5)]
VALIDATED = [*RUN, {"iteration": 4, "valid_loss": 0.5}]


def _write(path, iterations, resumed_at=0):
    metrics = MetricsFile(str(path), resumed_at)
    for i in iterations:
        metrics.write(iteration=i, train_loss=1 / i)
    metrics.close()


def test_resuming_replaces_what_runs_again(tmp_path):
    """Iterations after the last checkpoint run twice; each must be in the file once."""
    path = tmp_path / "m.jsonl"
    _write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"iteration": 8, "train')  # killed while writing
    _write(path, range(6, 11), resumed_at=5)
    # To the last bit.
    assert series(read_metrics(path), "train_loss") == {i: 1 / i for i in range(1, 11)}
    assert [r["iteration"] for r in read_metrics(path)] == list(range(1, 11))
    _write(path, [1])  # a new run
    assert len(read_metrics(path)) == 1


def test_other_files_are_errors(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="line 1 is no metrics record: 'hello'"):
        read_metrics(path)


@pytest.mark.parametrize(
    "runs", [{"a": VALIDATED}, {"a": VALIDATED, "b": RUN}, {"a": RUN, "b": []}]
)
def test_plot(tmp_path, runs):
    pytest.importorskip("matplotlib")
    plot_losses(runs, tmp_path / "plots" / "loss.png", title="Two runs")
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_differences_of_common_iterations():
    other = [{"iteration": i, "train_loss": 1 / i + i} for i in range(3, 9)]
    differences = absolute_differences(RUN, other, "train_loss")
    assert differences == {3: pytest.approx(3), 4: pytest.approx(4)}
    assert differences == absolute_differences(other, RUN, "train_loss")
