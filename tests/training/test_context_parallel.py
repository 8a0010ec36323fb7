"""scripts/train.py with every sequence cut over two processes learns what one process learns.

The same data, in fp32 on CPUs; runs of scripts/train.py in processes of their own. The learning
rate is low enough that rounding does not change which experts a token takes: from then on two runs
are different runs. If these fail, gradients are scaled wrongly, padding is learnt from, or a rank
has the wrong tokens or positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.job_server import JobServer

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training.metrics import read_metrics, series

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"

ITERATIONS = 50
FEW = 6
# Of the loss; a wrong factor or token shows in the first iteration, at 1e-3 or above.
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 1e-5
RUN = (
    "--preset tiny --num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 "
    # Balancing with a weight that shows.
    "--moe-aux-loss-coeff 0.01 --seq-length 32 --global-batch-size 2 --lr 3e-4 "
    f"--lr-decay-style constant --data texts --eval-interval {FEW} --eval-iters 1 --no-progress"
)
KINDS = {"sbhd": "--micro-batch-size 2", "packed": "--packed"}


@pytest.fixture(scope="module")
def train(server: JobServer) -> Callable[..., str]:
    """Run scripts/train.py in a folder, as one process or several; rank 0's output."""

    def run(folder: Path, options: str, processes: int = 0) -> str:
        codes, outputs, errors = server.run(
            [SCRIPT, *RUN.split(), *options.split()], folder, processes
        )
        assert codes == [0] * len(codes), [error[-3000:] for error in errors]
        return outputs[0]

    return run


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
    text = Path(__file__).read_text()
    for i in range(100):
        start, length = 29 * i, 1 + 37 * i % 60
        (folder / "texts" / f"{i}.txt").write_text(text[start : start + length])
    for kind, options in KINDS.items():
        train(folder, f"{options} --train-iters {ITERATIONS} --metrics {kind}.jsonl")
    return folder


@pytest.mark.parametrize(("kind", "exchange"), [("sbhd", "all_gather"), ("packed", "p2p")])
def test_fifty_iterations_are_those_of_one_process(folder, train, kind, exchange):
    options = f"{KINDS[kind]} --context-parallel-size 2 --cp-comm-type {exchange}"
    train(folder, f"{options} --train-iters {ITERATIONS} --metrics {kind}-cp2.jsonl", processes=2)
    assert_same_run(folder, f"{kind}-cp2", kind, range(1, ITERATIONS + 1))


def test_resumed_at_another_context_parallel_size(folder, train):
    """The checkpoint has the weights and the optimizer's state, and does not say how it was cut."""
    run = f"{KINDS['sbhd']} --metrics resumed.jsonl --save resumed --train-iters"
    train(folder, f"{run} {FEW} --context-parallel-size 2 --cp-comm-type p2p", processes=2)
    output = train(folder, f"{run} {2 * FEW} --load resumed")
    assert f"resumed at iteration {FEW}" in output
    assert "CP 1, DP 1" in output
    assert_same_run(folder, "resumed", "sbhd", range(1, 2 * FEW + 1))


def test_packed_with_tensor_and_sequence_parallelism(folder, train):
    parallel = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
    options = f"{KINDS['packed']} {parallel} --cp-comm-type all_gather p2p"
    train(folder, f"{options} --train-iters {FEW} --metrics tp2.jsonl", processes=4)
    assert_same_run(folder, "tp2", "packed", range(1, FEW + 1))


def test_packed_with_pipeline_stages(folder, train):
    """Padded packs have different lengths, which stages tell each other. Weights depend on stages,
    so the run to compare with has as many."""
    options = f"{KINDS['packed']} --num-experts 0 --pipeline-model-parallel-size 2 --train-iters 3"
    train(folder, f"{options} --metrics pp2.jsonl", processes=2)
    train(folder, f"{options} --context-parallel-size 2 --metrics pp2-cp2.jsonl", processes=4)
    assert_same_run(folder, "pp2-cp2", "pp2", range(1, 4))
