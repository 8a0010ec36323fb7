"""scripts/train.py --qk-clip holds the largest attention score, alike on one process and on two."""

from __future__ import annotations

import pytest

from training.metrics import read_metrics, series

THRESHOLD = 3.0
ITERATIONS = 40
RUN = (
    "--preset tiny --num-layers 2 --num-experts 0 --hidden-size 32 --ffn-hidden-size 64 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style "
    f"constant --eval-iters 0 --train-iters {ITERATIONS}"
)
CLIP = f"--qk-clip --qk-clip-threshold {THRESHOLD}"


@pytest.fixture(scope="module")
def largest(tmp_path_factory, train):
    """Runs one, and returns its largest score in each iteration."""
    folder = tmp_path_factory.mktemp("qk_clip")

    def run(options: str, processes: int = 0) -> list[float]:
        output = train(folder, f"{RUN} {options} --metrics m.jsonl", processes)
        found = series(read_metrics(folder / "m.jsonl"), "max_attention_logit")
        assert [*found] == [*range(1, ITERATIONS + 1)] and "| largest score " in output
        (folder / "m.jsonl").unlink()
        return [*found.values()]

    return run


def test_held(largest):
    without, held = largest("--log-max-attention-logit"), largest(CLIP)
    assert max(without) > 3 * THRESHOLD
    # An iteration may go above it: the weights are scaled after it.
    assert max(held[-20:]) < 2 * THRESHOLD
    # Rounding differs, and grows with the iterations.
    heads = largest(f"{CLIP} --tensor-model-parallel-size 2", processes=2)
    assert heads[:18] == pytest.approx(held[:18], rel=1e-3)
    assert max(held[:18]) > THRESHOLD
