#!/usr/bin/env python3
"""Train one model in bf16 and with linear layers in FP8, and compare the losses.

    $ python scripts/benchmarks/fp8_training.py docs/measurements/fp8
    $ python scripts/benchmarks/fp8_training.py RESULTS --gpus 2          # two runs at a time
    $ python scripts/benchmarks/fp8_training.py docs/measurements/fp8 --render old/fp8_training.json

Each run is scripts/train.py on one GPU with the sources of Python's standard library, byte by byte.
The model has DeepSeek-V3's attention with 16 heads, 8 layers and 656 M parameters. First it is
trained in bf16 for some iterations, in which any rounding changes the loss by several percent; all
runs continue from there, on the same batches. A run's loss is the mean of all its iterations; that
in FP8 must be within 1 % of that in bf16. How much of a difference is chance, the run bf16-absorbed
shows: it is in bf16 with the attention in the other form, which rounds elsewhere. Logs and metrics
stay in the folder. Output:

    95.0 s  absorbed fp8 blockwise: loss 1.812, loss of bf16's 1.0004, tokens_per_second 71000

The exit code is 1 if a run failed or is further off.
"""

from __future__ import annotations

import json
import queue
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.command import run_to_log

ATTENTIONS = ("absorbed", "standard")
PRECISIONS = {
    "bf16": "",
    "bf16-absorbed": "--form absorbed",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "tensorwise-ends-bf16": "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
}
MODEL = """
--num-experts 0 --num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16
--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
--vocab-size 32000 --rope-type rope --seq-length 2048 --micro-batch-size 4 --global-batch-size 8
--lr 2e-4 --lr-warmup-iters 20 --lr-decay-style constant --eval-iters 8 --bf16
"""
TRAIN = Path(__file__).resolve().parents[1] / "train.py"
# Iterations of a mean in the plot; by how much a run's loss may be off.
SMOOTH, TOLERANCE = 20, 0.01
TIMEOUT = 600.0


@dataclass(frozen=True)
class TrainingCase(kit.Case):
    """One training."""

    text = "{attention}{fp8} {precision}"
    attention: str  # value of train.py's --attention
    precision: str  # key of PRECISIONS

    @property
    def fp8(self) -> str:
        """For the name."""
        return "" if self.precision.startswith("bf16") else " fp8"


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What a training wrote."""

    case: TrainingCase
    losses: list[float] = field(default_factory=list)  # of every iteration
    validation: float | None = None  # loss at the end; None if there was none
    seconds: list[float] = field(default_factory=list)  # of every iteration
    tokens: int = 0  # of an iteration

    @property
    def loss(self) -> float:
        """Mean of all iterations."""
        return mean(self.losses)


class TrainingReport(kit.Report):
    """One call of the script; ratios are to the run of the same attention in bf16."""

    row = Row

    def in_bf16(self, row: Row) -> Row | None:
        """The run to compare with."""
        case = TrainingCase(row.case.attention, "bf16")
        return next((other for other in self.measured if other.case == case), None)

    def figures(self, row: Row) -> dict[str, float]:
        """Losses, and by how much they are off."""
        seconds = median(row.seconds[len(row.seconds) // 4 :])
        found = {"loss": row.loss, "tokens_per_second": row.tokens / seconds}
        if row.validation is not None:
            found["validation"] = row.validation
        other = self.in_bf16(row)
        if other is not None and other is not row:
            found["loss of bf16's"] = row.loss / other.loss
            if row.validation is not None and other.validation:
                found["validation of bf16's"] = row.validation / other.validation
        return found

    def is_close(self, row: Row) -> bool:
        """Whether the loss is near bf16's."""
        return abs(self.figures(row).get("loss of bf16's", 1.0) - 1) <= TOLERANCE

    @classmethod
    def panels(cls, reports: Sequence[TrainingReport]) -> list[kit.Panel]:
        """Losses, and their ratios to bf16's, each a mean over some iterations."""
        losses, ratios = {}, {}
        for report in reports:
            for row in report.measured:
                curve = losses[str(row.case)] = smoothed(row.losses)
                other = report.in_bf16(row)
                if other is not None and other is not row:
                    theirs = smoothed(other.losses)
                    ratios[str(row.case)] = [(i, a / b) for (i, a), (_, b) in zip(curve, theirs)]
        title = f"loss per byte (nats), mean of {SMOOTH}"
        return [
            kit.Panel(title, "iteration", losses, sizes=False, marker=""),
            kit.Panel("loss divided by bf16's", "iteration", ratios, sizes=False, marker=""),
        ]


def smoothed(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Means of the last iterations before each one."""
    return [(i, mean(losses[max(0, i - SMOOTH) : i])) for i in range(1, len(losses) + 1)]


def read_metrics(case: TrainingCase, path: Path) -> Row:
    """The row of a training from the file that train.py wrote."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if "train_loss" in line]
    return Row(
        case=case,
        losses=[line["train_loss"] for line in steps],
        validation=next((x["valid_loss"] for x in reversed(lines) if "valid_loss" in x), None),
        seconds=[line["seconds"] for line in steps],
        tokens=steps[0]["tokens"],
    )


class TrainingBenchmark(kit.Benchmark):
    """One training for each attention and precision, some at a time."""

    files = "fp8_training"
    report = TrainingReport
    options = kit.declare(
        "folder render seed=1234",
        attentions=kit.some("which MLA to train", ATTENTIONS, "absorbed"),
        precisions=kit.some("bf16, and FP8 with these scales", PRECISIONS),
        iterations=kit.number("updates of each run", 200),
        first_iterations=kit.number("updates in bf16 before them", 100),
        gpus=kit.number("how many there are", 1),
        runs_per_gpu=kit.number("runs on a GPU at a time, which makes their times meaningless", 1),
        train=kit.Option(
            "more of train.py's options, for all runs (default: none)",
            default="",
            more={"metavar": "'--OPTION ...'"},
        ),
    )

    def prepare(self) -> None:
        """Nothing: trainings have processes of their own."""

    def environment(self) -> dict:
        """With the options of all runs."""
        import torch

        options = f"{' '.join(MODEL.split())} {self.args.train}".strip()
        return kit.provenance.describe(torch.cuda.is_available(), "bfloat16", train=options)

    def cases(self) -> list[TrainingCase]:
        """bf16 first."""
        args = self.args
        return [TrainingCase(*one) for one in product(args.attentions, args.precisions)]

    def rows(self) -> Iterator[Row]:
        """All runs, in the order of the cases."""
        args = self.args
        args.folder.mkdir(parents=True, exist_ok=True)
        free: queue.Queue[int] = queue.Queue()
        for gpu in [*range(args.gpus)] * args.runs_per_gpu:
            free.put(gpu)

        def run(case: TrainingCase) -> Row:
            gpu = free.get()
            try:
                return self.row_of(case, gpu, Path(scratch))
            finally:
                free.put(gpu)

        with (
            tempfile.TemporaryDirectory() as scratch,
            ThreadPoolExecutor(args.gpus * args.runs_per_gpu) as pool,
        ):
            error = self.train("first", 0, args.first_iterations, ["--save", scratch])
            if error:
                yield from (self.failed(case, f"the first run: {error}") for case in self.cases())
                return
            yield from pool.map(run, self.cases())

    def row_of(self, case: TrainingCase, gpu: int, first: Path) -> Row:
        """Continue from the first run's checkpoint."""
        name = f"{case.attention}-{case.precision}"
        metrics = self.args.folder / f"{name}.jsonl"
        options = ["--attention", case.attention, *PRECISIONS[case.precision].split()]
        options += ["--load", str(first), "--metrics", str(metrics)]
        error = self.train(name, gpu, self.args.first_iterations + self.args.iterations, options)
        return self.failed(case, error) if error else read_metrics(case, metrics)

    def train(self, name: str, gpu: int, iterations: int, options: Sequence[str]) -> str:
        """Run train.py on one GPU; returns "", or why it failed."""
        log = self.args.folder / f"{name}.log"
        command = [sys.executable, str(TRAIN), *MODEL.split(), *shlex.split(self.args.train)]
        command += ["--train-iters", str(iterations), "--seed", str(self.args.seed), *options]
        code = run_to_log(command, log, TIMEOUT, {"CUDA_VISIBLE_DEVICES": str(gpu)})
        if code is None:
            return f"not over after {TIMEOUT:g} s"
        lines = log.read_text(errors="replace").strip().splitlines()
        return (lines[-1] if lines else f"exit code {code}") if code else ""

    def exit_code(self, report: kit.Report) -> int:
        """1 if a run failed or its loss is too far off."""
        return int(any(row.error or not report.is_close(row) for row in report.rows))


if __name__ == "__main__":
    kit.main(TrainingBenchmark)
