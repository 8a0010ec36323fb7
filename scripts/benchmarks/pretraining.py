#!/usr/bin/env python3
"""Pretrain one small model through Megatron's own loop, with its MLA and with ours.

    $ python scripts/benchmarks/pretraining.py docs/measurements/pretraining
    $ python scripts/benchmarks/pretraining.py /tmp/quick --iterations 20 --layers 2 --skip 5
    $ python scripts/benchmarks/pretraining.py RESULTS --render old/pretraining.json

Each run is pretrain_gpt.py in processes of its own, with mock data; all runs begin with the same
weights. The model's MLA has DeepSeek-V3's dimensions and 16 heads. GPUs compute in bfloat16 with
TransformerEngine's layers, a CPU in float32 with Megatron's local ones, for tests. Compared are the
losses of every iteration, tokens per second, and MFU: Megatron's own count of TFLOP/s, in which
backward is twice forward and causal attention half, over 989.4 (H100, H200). The logs stay in the
folder.
Output:

    95.0 s  absorbed (expanded, cudnn): iteration_ms 300, tokens_per_second 54613, mfu 0.32

The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit, megatron_log
from benchmarks.kit.command import ALONE, run_to_log
from benchmarks.kit.tables import gibibytes
from benchmarks.megatron_log import Iteration
from console.parser import Parser

# Each with its layers; on a GPU Megatron builds TransformerEngine's without a spec.
SPECS = {
    "standard": ("absorbed_mla.standard_mla", "get_standard_mla_layer_spec"),
    "absorbed": ("specs.absorbed_mla_layer_specs", "get_absorbed_mla_layer_spec"),
}
# Of an H100 or H200, dense bf16, by NVIDIA's datasheet.
PEAK_TFLOPS = 989.4
ENTRY = Path(__file__).with_name("pretrain_gpt.py")
# Fusion of gradient accumulation needs apex; the logger is a package of NVIDIA's.
_ALWAYS = """
--multi-latent-attention --qk-layernorm --swiglu --disable-bias-linear --no-rope-fusion
--untie-embeddings-and-output-weights --rope-type rope --position-embedding-type rope
--normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine
--mock-data --tokenizer-type NullTokenizer --no-create-attention-mask-in-dataloader
--eval-iters 0 --log-interval 1 --log-throughput --no-gradient-accumulation-fusion --no-one-logger
"""
_ON_GPU = "--bf16 --transformer-impl transformer_engine"
# Clipping fails on a CPU: it expects a tensor type with "cuda" in its name.
_ON_CPU = """
--transformer-impl local --distributed-backend gloo --num-workers 0 --clip-grad 0
--no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization
"""
LEARNING_RATE = 3e-4
# After so many seconds a run is ended.
TIMEOUT = 600.0


def megatron_arguments(args: argparse.Namespace, attention: str, on_gpu: bool) -> list[str]:
    """Megatron's command line; the same for all runs but for the attention.

    Args:
        args: The script's.
        attention: A name in ``SPECS``.
        on_gpu: bf16 with TransformerEngine's layers, or fp32 with Megatron's local ones.
    """
    options = {f"--{name}": size for name, size in kit.dims_of(args).items()}
    options |= {
        "--num-layers": args.layers,
        "--num-attention-heads": args.heads,
        "--ffn-hidden-size": args.ffn_hidden_size,
        "--vocab-size": args.vocab_size,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.seq_length,
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--train-iters": args.iterations,
        "--lr": LEARNING_RATE,
        "--min-lr": LEARNING_RATE / 10,
        "--lr-warmup-iters": max(1, args.iterations // 10),
        "--seed": args.seed,
        "--eval-interval": args.iterations + 1,
    }
    own = [str(part) for pair in options.items() for part in pair]
    own += [*_ALWAYS.split(), *(_ON_GPU if on_gpu else _ON_CPU).split()]
    if attention == "absorbed" or not on_gpu:
        own += ["--spec", *SPECS[attention]]
    return own + args.megatron.split()


@dataclass(frozen=True)
class Run:
    """What one training printed."""

    name: str  # the attention's
    attention: str  # "standard" or "absorbed"
    iterations: list[Iteration] = field(default_factory=list)  # every one
    skip: int = 0  # first iterations that are not in the throughput
    parameters: int | None = None  # of the model
    peak_bytes: int | None = None  # most memory allocated on the GPU; None without one
    ran: str = ""  # form and backend of our attentions; empty of another's, or if not recorded
    error: str = ""  # empty, or why the training did not end well

    @property
    def case(self) -> str:
        """What the run is called in reports."""
        return self.name

    @property
    def timed(self) -> list[Iteration]:
        """The iterations that are in the throughput."""
        return self.iterations[self.skip :]


def train(attention: str, weights: Path, args: argparse.Namespace, on_gpu: bool) -> Run:
    """Train once, in processes of their own, because Megatron's loop ends its process.

    Args:
        attention: A name in ``SPECS``; also of the log in the folder.
        weights: File of the weights to begin with; written if it is not there.
        args: The script's.
        on_gpu: Whether there is a GPU.
    """
    option = "--first-weights" if weights.exists() else "--save-first-weights"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.gpus)]
    command = [sys.executable, *(launcher if args.gpus > 1 else ()), str(ENTRY)]
    command += [*megatron_arguments(args, attention, on_gpu), option, str(weights)]
    path = args.folder / f"{attention}.log"
    code = run_to_log(command, path, TIMEOUT, ALONE)
    text = path.read_text(errors="replace")
    lines, error = list(megatron_log.iterations(text)), ""
    if code is None:
        error = f"not over after {TIMEOUT:g} s"
    elif code:
        error = megatron_log.problem(text)
    elif len(lines) < args.iterations:
        error = f"the log has {len(lines)} of {args.iterations} iterations"
    facts = megatron_log.facts(text)
    return Run(attention, attention, lines, args.skip, **facts, error=error)


class PretrainingReport(kit.Report):
    """One call of the script; its rows are runs."""

    row = Run
    rows_key = "runs"

    def figures(self, run: Run) -> dict[str, float]:
        """Of the iterations that are timed, and the last loss."""
        seconds, tflops = (
            median(getattr(one, name) for one in run.timed) for name in ("seconds", "tflops")
        )
        peak = self.environment["peak_tflops"]
        return {
            "iteration_ms": 1e3 * seconds,
            "tokens_per_second": self.environment["tokens_per_iteration"] / seconds,
            "tflops": tflops,
            **({"mfu": tflops / peak} if peak else {}),
            **gibibytes(run),
            "first_loss": run.iterations[0].loss,
            "last_loss": run.iterations[-1].loss,
        }

    @classmethod
    def notes(cls, reports: Sequence[PretrainingReport]) -> list[str]:
        """Differences of the losses of each run and the one before it."""
        pairs = [pair for report in reports for pair in pairwise(report.measured)]
        found = []
        for left, right in pairs:
            gaps = [abs(a.loss - b.loss) for a, b in zip(left.iterations, right.iterations)]
            last = [mean(one.loss for one in run.iterations[-10:]) for run in (left, right)]
            found.append(
                f"- {left.name} and {right.name}: largest difference of the loss {max(gaps):.1e}, "
                f"of the mean of the last ten {last[1] - last[0]:+.1e}"
            )
        return found

    @classmethod
    def panels(cls, reports: Sequence[PretrainingReport]) -> list[kit.Panel]:
        """Losses."""
        curves = {
            run.name: [(one.iteration, one.loss) for one in run.iterations]
            for report in reports
            for run in report.measured
        }
        return [kit.Panel("loss per token (nats)", "iteration", curves, sizes=False, marker="")]


class PretrainingBenchmark(kit.Benchmark):
    """One training for each attention."""

    files = "pretraining"
    report = PretrainingReport
    strict = True
    options = kit.declare(
        "folder render seed=1234",
        attentions=kit.some("which MLA to train", SPECS),
        iterations=kit.number("updates of each run", 60),
        skip=kit.number("first updates, left out of the throughput", 10),
        layers=kit.number("decoder layers of the model", 8),
        heads=kit.number("attention heads of each layer", 16),
        ffn_hidden_size=kit.number("width of the MLP", 8192),
        vocab_size=kit.number("rows of the embedding", 32000),
        seq_length=kit.number("tokens of a sequence", 4096),
        micro_batch_size=kit.number("sequences of a forward", 1),
        global_batch_size=kit.number("sequences of an update", 4),
        gpus=kit.number("data-parallel processes", 1),
        megatron=kit.Option(
            "more of Megatron's options, for all runs (default: none)",
            default="",
            more={"metavar": "'--OPTION ...'"},
        ),
        dims={**kit.DIMS, "hidden-size": 2048},
    )
    quick = (
        "--iterations 4 --skip 2 --layers 1 --vocab-size 128 --seq-length 32 "
        "--global-batch-size 2 --ffn-hidden-size 64"
    )

    def prepare(self) -> None:
        """TransformerEngine must be there if there is a GPU."""
        import torch

        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu and find_spec("transformer_engine") is None:
            raise ValueError(
                "Megatron's standard MLA on a GPU needs transformer-engine, not installed here"
            )

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """Some iterations are timed, and Megatron can divide the batch."""
        if args.iterations <= args.skip:
            parser.error(
                f"--iterations must be more than --skip {args.skip}, got {args.iterations}"
            )
        samples = args.micro_batch_size * args.gpus
        if args.global_batch_size % samples:
            parser.error(
                "--global-batch-size must be a multiple of --micro-batch-size x --gpus = "
                f"{samples}, got {args.global_batch_size}"
            )

    def environment(self) -> dict:
        """With the sizes of the model."""
        args, on_gpu = self.args, self.on_gpu
        sizes = {"layers": args.layers, "heads": args.heads}
        sizes |= {"ffn-hidden-size": args.ffn_hidden_size} | kit.dims_of(args)
        sizes |= {"vocabulary": args.vocab_size, "sequence": args.seq_length}
        return kit.provenance.describe(
            on_gpu,
            "bfloat16" if on_gpu else "float32",
            gpus=args.gpus if on_gpu else 0,
            peak_tflops=PEAK_TFLOPS if on_gpu else None,
            tokens_per_iteration=args.global_batch_size * args.seq_length,
            model=sizes,
            megatron=args.megatron,
        )

    def rows(self) -> Iterator[Run]:
        """All runs, which begin with the same weights."""
        self.args.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            weights = Path(scratch) / "first_weights.pt"
            for attention in self.args.attentions:
                yield train(attention, weights, self.args, self.on_gpu)


if __name__ == "__main__":
    kit.main(PretrainingBenchmark)
