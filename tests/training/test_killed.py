"""Two tensor-parallel processes that are killed and resumed train as if they had not been.

Losses and gradient norms must be equal to the last bit: any difference means that data order,
dropout, the optimizer's state or some weights were lost.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from counting import count_from
from training.metrics import read_metrics, series

ITERATIONS = 8
RUN = (
    "--preset tiny --num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 "
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1 "
    "--attention-dropout 0.1 --tensor-model-parallel-size 2 --sequence-parallel "
    "--recompute-granularity selective --recompute-modules mla_up_proj core_attn "
    f"--train-iters {ITERATIONS} --save-interval 1"
)


def running(parent: int | None = None) -> set[int]:
    """Ids of all running processes, or of those that a parent has started."""
    listing = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listing.stdout.splitlines()]
    alive = {int(pid): int(of) for pid, of, state in rows if not state.startswith("Z")}
    return {pid for pid, of in alive.items() if parent in (None, of)}


def kill(process: subprocess.Popen) -> None:
    """Kill torchrun alone by SIGKILL; its ranks must end, too."""
    ranks = running(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while orphans := running() & ranks:
        if time.monotonic() > deadline:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"ranks outlived torchrun: {orphans}")
        time.sleep(0.05)


def iterations_logged(path: Path) -> int:
    return len(series(read_metrics(path), "train_loss")) if path.exists() else 0


def test_resumed_after_a_kill_is_bitwise_the_same(torchrun, train, tmp_path):
    (tmp_path / "text.txt").write_text(count_from(0, 700))
    train(tmp_path, f"{RUN} --data text.txt --metrics whole.jsonl --save whole", processes=2)
    run = f"{RUN} --data text.txt --metrics killed.jsonl --save killed"
    metrics = tmp_path / "killed.jsonl"
    process = torchrun(run, 2, cwd=tmp_path, stderr=subprocess.STDOUT)
    while iterations_logged(metrics) < 3 and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None, "it finished before it was killed"
    kill(process)
    assert "resumed at iteration" in train(tmp_path, f"{run} --load killed", processes=2)
    whole, parts = (read_metrics(tmp_path / f"{n}.jsonl") for n in ("whole", "killed"))
    for key in ("train_loss", "grad_norm"):
        assert len(series(whole, key)) == ITERATIONS
        assert series(parts, key) == series(whole, key)
