"""scripts/train.py as a whole, in a process of its own: resuming, starting from weights, errors.

If these fail, a run that was interrupted does not continue as if it had not been.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training.metrics import read_metrics, series

_SMALL = (
    "--num-layers 2 --moe-layer-freq [0,1] --hidden-size 32 --ffn-hidden-size 64 --seq-length 32"
)
_RUN = f"{_SMALL} --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0.1 --train-iters 6"


def _train(tmp_path: Path, options: str, expect: int = 0) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).resolve().parents[2] / "scripts" / "train.py"),
            *options.split(),
            "--no-progress",
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == expect, done.stderr[-3000:]
    return done.stderr if expect else done.stdout


def _losses(tmp_path: Path, name: str) -> list[dict]:
    records = read_metrics(tmp_path / name)
    return [series(records, key) for key in ("train_loss", "valid_loss", "grad_norm", "lr")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    (folder / "text.txt").write_text(Path(__file__).read_text())
    run = f"{_RUN} --data text.txt --metrics whole.jsonl --save whole --save-interval 3"
    _train(folder, run)
    return folder


def test_a_resumed_run_has_the_same_losses_to_the_last_bit(uninterrupted):
    folder = uninterrupted
    run = f"{_RUN} --data text.txt --metrics parts.jsonl --save parts"
    _train(folder, f"{run} --exit-interval 4")
    output = _train(folder, f"{run} --load parts")
    assert "resumed at iteration 4" in output
    assert _losses(folder, "parts.jsonl") == _losses(folder, "whole.jsonl")


def test_a_checkpoint_of_another_run_is_refused(uninterrupted):
    error = _train(uninterrupted, f"{_RUN} --data text.txt --load whole --seed 7", expect=2)
    assert error.strip().splitlines()[-1].startswith("train.py: error: --load: --seed differs")
    assert "Traceback" not in error
