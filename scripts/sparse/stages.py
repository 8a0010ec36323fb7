"""The stages: train.py's command lines, run one after the other in this process."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from counting import write_texts
from training.entry import run

# An indexer with the structure of DeepSeek-V3.2's, for the model of --preset tiny.
_INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32"
# Both ways have the same rates, so that their losses can be compared step by step.
_GO_ON = "--lr 1e-3 --lr-warmup-iters 10"
_WARM_UP = "--lr 5e-3 --lr-warmup-iters 10 --lr-decay-style constant --weight-decay 0"


# The sizes of a run, which are options of sparse_finetune.py: the default, and what it is.
SIZES = {
    "dense_iters": (120, "iterations of the dense model that all begins with"),
    "warmup_iters": (60, "iterations of the indexer's warm-up"),
    "sparse_iters": (120, "iterations of the sparse model, and of the dense one beside it"),
    "interval": (20, "iterations between two measurements"),
    "seq_length": (512, "tokens in a sequence"),
    "topk": (32, "keys that a query attends to"),
    "batch_size": (4, "sequences in an iteration"),
    "eval_iters": (4, "batches of held-out text in a measurement"),
}


@dataclass(frozen=True)
class Stage:
    """One run of train.py.

    Attributes:
        name: Of its folder.
        argv: Its command line.
        before: The stage whose weights it begins with; None for the first.
    """

    name: str
    argv: list[str]
    before: Stage | None = None

    @property
    def is_sparse(self) -> bool:
        """Whether its checkpoints have an indexer."""
        new = "--new-indexer" in self.argv
        return new or (self.before is not None and self.before.is_sparse)

    @property
    def folder(self) -> Path:
        """Where its checkpoints are."""
        return Path(self.argv[self.argv.index("--save") + 1])

    @property
    def metrics(self) -> Path:
        """Its metrics file."""
        return Path(self.argv[self.argv.index("--metrics") + 1])


def stages(folder: Path, settings: Namespace) -> dict[str, Stage]:
    """All stages by name, in the order in which they run."""
    indexer = f"--new-indexer {_INDEXER} --dsa-indexer-topk {settings.topk} --train-only indexer"
    dense = Stage("dense", _command(folder, settings, "dense", "", settings.dense_iters))

    def after(before: Stage, name: str, options: str, iterations: int) -> Stage:
        start = f"--load {shlex.quote(str(before.folder))} --use-checkpoint-args {options}"
        return Stage(name, _command(folder, settings, name, start, iterations), before)

    warm_up = after(dense, "warm-up", f"{indexer} {_WARM_UP}", settings.warmup_iters)
    continued = after(dense, "continued", f"--finetune {_GO_ON}", settings.sparse_iters)
    sparse = after(warm_up, "sparse", f"--finetune {_GO_ON}", settings.sparse_iters)
    return {stage.name: stage for stage in (dense, continued, warm_up, sparse)}


def _command(
    folder: Path, settings: Namespace, name: str, options: str, iterations: int
) -> list[str]:
    interval = settings.interval if options else iterations
    line = (
        f"{options} --data {shlex.quote(str(folder / 'text'))} --split 90,10 "
        f"--seq-length {settings.seq_length} --micro-batch-size {settings.batch_size} "
        f"--train-iters {iterations} --log-interval {settings.interval} "
        "--eval-iters 0 "
        f"--metrics {shlex.quote(str(folder / name))}.jsonl "
        f"--save {shlex.quote(str(folder / name))} --save-interval {interval}"
    )
    return shlex.split(line)


def run_stages(folder: Path, settings: Namespace) -> dict[str, Stage]:
    """Write the texts, and run all stages."""
    write_texts(folder / "text")
    found = stages(folder, settings)
    for stage in found.values():
        print(f"\n$ python scripts/train.py {shlex.join(stage.argv)}", flush=True)
        run(stage.argv)
    return found
