"""Two tensor-parallel processes, killed at any moment and resumed, train as if nothing happened.

Losses and gradient norms must agree to the last bit: a resumed run that only nearly continues has
lost data order, dropout, the optimizer's state or a part of the weights.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training.metrics import read_metrics, series

REPO = Path(__file__).resolve().parents[2]
ITERATIONS = 12
RUN = (
    "--preset tiny --num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--recompute-granularity selective --recompute-modules mla_up_proj core_attn "
    f"--train-iters {ITERATIONS} --save-interval 1 --no-progress"
)


def start(folder: Path, options: str) -> subprocess.Popen:
    """Torchrun, which nothing but this test ends."""
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    return subprocess.Popen(
        [
            sys.executable,
            *launcher.split(),
            str(REPO / "scripts" / "train.py"),
            *RUN.split(),
            *options.split(),
        ],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes() -> dict[int, int]:
    """Every process that has not ended, and the one that started it."""
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to torchrun alone; its ranks, in sessions of their own, must not live on."""
    ranks = [pid for pid, parent in processes().items() if parent == process.pid]
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while orphans := processes().keys() & set(ranks):
        if time.monotonic() > deadline:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"ranks outlived torchrun: {orphans}")
        time.sleep(0.05)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    return output


def iterations_logged(path: Path) -> int:
    return len(series(read_metrics(path), "train_loss")) if path.exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "text.txt").write_text(Path(__file__).read_text())
    finish(start(folder, "--data text.txt --metrics whole.jsonl --save whole"))
    return folder


def test_resumed_after_kills_is_bitwise_the_same(uninterrupted):
    folder = uninterrupted
    options = "--data text.txt --metrics killed.jsonl --save killed"
    process = start(folder, options)
    for killed_after in (2, 5):
        while iterations_logged(folder / "killed.jsonl") < killed_after and process.poll() is None:
            time.sleep(0.05)
        assert process.poll() is None, "it finished before it was killed"
        kill(process)
        process = start(folder, f"{options} --load killed")
    assert "resumed at iteration" in finish(process)
    whole, parts = (read_metrics(folder / f"{n}.jsonl") for n in ("whole", "killed"))
    for key in ("train_loss", "grad_norm"):
        assert len(series(whole, key)) == ITERATIONS
        assert series(parts, key) == series(whole, key)
