"""scripts/train.py --qk-clip holds the largest attention score, alike on one process and on two."""

import pytest

from training.metrics import read_metrics, series

THRESHOLD = 3.0
ITERATIONS, FEW = 40, 18
RUN = (
    "--preset tiny --num-layers 2 --num-experts 0 --hidden-size 32 --ffn-hidden-size 64 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style "
    "constant --eval-iters 0"
)
CLIP = f"--qk-clip --qk-clip-threshold {THRESHOLD}"


@pytest.fixture(scope="module")
def largest(tmp_path_factory, train):
    """Runs one, and returns its largest score in each iteration."""
    folder = tmp_path_factory.mktemp("qk_clip")

    def run(options: str, processes: int = 0, iterations: int = ITERATIONS) -> list[float]:
        run = f"{RUN} {options} --train-iters {iterations} --metrics m.jsonl"
        output = train(folder, run, processes)
        found = series(read_metrics(folder / "m.jsonl"), "max_attention_logit")
        assert [*found] == [*range(1, iterations + 1)] and "| largest score " in output
        (folder / "m.jsonl").unlink()
        return [*found.values()]

    return run


def test_held(largest):
    without, held = largest("--log-max-attention-logit"), largest(CLIP)
    assert max(without) > 3 * THRESHOLD
    # An iteration may go above it: the weights are scaled after it.
    assert max(held[-20:]) < 2 * THRESHOLD
    # Rounding differs, and grows with the iterations.
    heads = largest(f"{CLIP} --tensor-model-parallel-size 2", 2, FEW)
    assert heads == pytest.approx(held[:FEW], rel=1e-3)
    assert max(heads) > THRESHOLD
