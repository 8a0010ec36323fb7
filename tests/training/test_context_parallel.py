"""scripts/train.py with context parallelism over two processes learns what one process learns.

The same data, in fp32 on CPUs. The learning rate is low enough that rounding does not change the
experts of a token, after which two runs would differ. If these fail, gradients are scaled wrongly,
padding contributes to the loss, or a rank has the wrong tokens or positions.
"""

from pathlib import Path

import pytest

from counting import count_from
from training.metrics import read_metrics, series

ITERATIONS = 12
FEW = 6
# Of the loss; a wrong factor or token shows in the first iteration, at 1e-3 or above.
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 1e-5
RUN = (
    "--preset tiny --num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 "
    # Balancing with a weight that shows.
    "--moe-aux-loss-coeff 0.01 --seq-length 32 --global-batch-size 2 --lr 3e-4 "
    f"--lr-decay-style constant --data texts --eval-interval {FEW} --eval-iters 1"
)
KINDS = {"sbhd": "--micro-batch-size 2", "packed": "--packed"}


def assert_same_run(folder: Path, name: str, expected: str, iterations: range) -> None:
    """Losses, gradient norms and numbers of tokens of two metrics files agree."""
    one, other = (read_metrics(folder / f"{n}.jsonl") for n in (expected, name))
    for key, tolerance in (
        ("train_loss", LOSS_TOLERANCE),
        ("valid_loss", LOSS_TOLERANCE),
        ("grad_norm", NORM_TOLERANCE),
        ("tokens", 0),
    ):
        right = {i: value for i, value in series(one, key).items() if i in iterations}
        measured = {i: value for i, value in series(other, key).items() if i in iterations}
        assert right
        assert measured == pytest.approx(right, rel=tolerance, abs=0), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory, train) -> Path:
    """Runs of one process, by kind, and their data: documents of 1 to 60 characters."""
    folder = tmp_path_factory.mktemp("context_parallel")
    (folder / "texts").mkdir()
    text = count_from(0, 700)
    for i in range(100):
        start, length = 29 * i, 1 + 37 * i % 60
        (folder / "texts" / f"{i}.txt").write_text(text[start : start + length])
    for kind, options in KINDS.items():
        train(folder, f"{RUN} {options} --train-iters {ITERATIONS} --metrics {kind}.jsonl")
    return folder


@pytest.mark.parametrize(
    ("kind", "exchange", "processes", "count"),
    [
        ("sbhd", "all_gather", 2, ITERATIONS),
        ("packed", "p2p", 2, ITERATIONS),
        ("packed", "all_gather p2p --tensor-model-parallel-size 2 --sequence-parallel", 4, FEW),
    ],
)
def test_iterations_are_those_of_one_process(folder, train, kind, exchange, processes, count):
    options = f"{RUN} {KINDS[kind]} --context-parallel-size 2 --cp-comm-type {exchange}"
    name = f"{kind}-{processes}"
    train(folder, f"{options} --train-iters {count} --metrics {name}.jsonl", processes=processes)
    assert_same_run(folder, name, kind, range(1, count + 1))


def test_resumed_at_another_context_parallel_size(folder, train):
    """A checkpoint does not depend on the parallel sizes of the run that saved it."""
    run = f"{RUN} {KINDS['sbhd']} --metrics resumed.jsonl --save resumed --train-iters"
    train(folder, f"{run} {FEW} --context-parallel-size 2 --cp-comm-type p2p", processes=2)
    output = train(folder, f"{run} {ITERATIONS} --load resumed")
    assert f"resumed at iteration {FEW}" in output
    assert "CP 1, DP 1" in output
    assert_same_run(folder, "resumed", "sbhd", range(1, ITERATIONS + 1))


def test_packed_with_pipeline_stages(folder, train):
    """Padded packs have different lengths, which stages tell each other. Weights depend on stages,
    so the run to compare with has as many."""
    options = f"{RUN} {KINDS['packed']} --num-experts 0 --pipeline-model-parallel-size 2"
    options += " --train-iters 3"
    train(folder, f"{options} --metrics pp2.jsonl", processes=2)
    train(folder, f"{options} --context-parallel-size 2 --metrics pp2-cp2.jsonl", processes=4)
    assert_same_run(folder, "pp2-cp2", "pp2", range(1, 4))
