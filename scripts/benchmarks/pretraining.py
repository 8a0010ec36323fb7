#!/usr/bin/env python3
"""Pretrain one small model through Megatron's own loop, with its MLA and with ours.

    $ python scripts/benchmarks/pretraining.py docs/pretraining
    $ python scripts/benchmarks/pretraining.py /tmp/quick --iterations 20 --layers 2 --skip 5
    $ python scripts/benchmarks/pretraining.py docs/pretraining --render old/pretraining.json

Each run is scripts/benchmarks/pretrain_gpt.py in processes of its own, which calls
megatron.training.pretrain with mock data; all begin with the same weights. The model's MLA has
DeepSeek-V3's dimensions and 16 heads. GPUs compute in bfloat16 with TransformerEngine's layers; a
CPU computes in float32 with Megatron's local ones, which is for tests. Compared are the losses of
every iteration, tokens per second, and MFU: Megatron's own count of TFLOP/s, in which backward is
twice forward and causal attention half, over --peak-tflops. The runs' logs stay in the folder.
Output:

    absorbed (expanded, cudnn): iteration_ms 300, tokens_per_second 54613, tflops 321.5, mfu 0.32

The exit code is 1 if a run failed; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import count, dims_of, list_of, one_of, seconds
from benchmarks.kit.plot import Panel
from benchmarks.kit.report import Report, Results
from benchmarks.kit.tables import gibibytes
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import leave, run_script

NAME = "pretraining"
ATTENTIONS = ("standard", "absorbed")
# Of an H100 or H200, dense bf16, by NVIDIA's datasheet.
PEAK_TFLOPS = 989.4
DIMS = {**arguments.DIMS, "hidden-size": 2048}
ENTRY = Path(__file__).with_name("pretrain_gpt.py")
_SPECS = {
    "absorbed": ("specs.absorbed_mla_layer_specs", "get_absorbed_mla_layer_spec"),
    # Only where there is no TransformerEngine, whose layers Megatron builds without a spec.
    "standard": ("absorbed_mla.standard_mla", "get_standard_mla_layer_spec"),
}
# A world of one process, where nobody listens; torchrun replaces it.
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}

# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("pretraining.py", __doc__)
    add = parser.add_argument
    arguments.add_folder(parser, "pretraining.json, .png and the logs", several=False)
    both = ",".join(ATTENTIONS)
    add("--attentions", type=list_of(one_of(ATTENTIONS)), default=both, help="whose, in turn")
    add("--noise", action="store_true", help="train the first attention twice: how far it repeats")
    add("--iterations", type=count, default=60, help="of a run")
    add("--skip", type=count, default=10, help="first ones, not in the throughput")
    add("--layers", type=count, default=8, help="of the model")
    add("--heads", type=count, default=16, help="of the model")
    add("--ffn-hidden-size", type=count, default=8192, help="width of the MLP")
    add("--vocab-size", type=count, default=32000, help="rows of the embedding")
    add("--seq-length", type=count, default=4096, help="tokens of a sequence")
    add("--micro-batch-size", type=count, default=1, help="sequences of a forward")
    add("--global-batch-size", type=count, default=4, help="sequences of an update")
    add("--learning-rate", type=seconds, default=3e-4, help="the highest")
    add("--gpus", type=count, default=1, help="processes, data-parallel")
    add("--peak-tflops", type=seconds, default=PEAK_TFLOPS, help="of a GPU, for the MFU")
    add("--timeout", type=seconds, default=600.0, help="of one run, in s")
    add("--seed", type=count, default=1234, help="of weights and dropout")
    add(
        "--megatron",
        default="",
        metavar="'--OPTION ...'",
        help="more of Megatron's options, for all runs (default: none)",
    )
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.iterations <= args.skip:
        parser.error(f"--iterations must be more than --skip {args.skip}, got {args.iterations}")
    samples = args.micro_batch_size * args.gpus
    if args.global_batch_size % samples:
        parser.error(
            f"--global-batch-size must be a multiple of --micro-batch-size x --gpus = {samples}, "
            f"got {args.global_batch_size}"
        )
    arguments.check_files(args.folder, args.render)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare, or render what was measured; returns the exit code."""
    return run_script("pretraining.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.render:
        [report] = PretrainingReport.show_again(args.render)
        results(report).publish(args.folder, NAME)
        return 0
    return compare(args)


def compare(args: argparse.Namespace) -> int:
    """Train with every attention, write everything, and return the exit code.

    Raises:
        ValueError: If there is a GPU but not what Megatron's own MLA needs there.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu and find_spec("transformer_engine") is None:
        raise ValueError(
            "Megatron's standard MLA on a GPU needs transformer-engine, not installed here"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = [(name, name) for name in args.attentions]
    if args.noise:
        runs.insert(0, (f"{args.attentions[0]} again", args.attentions[0]))
    report = PretrainingReport(_describe(args, on_gpu))
    with tempfile.TemporaryDirectory() as scratch:
        for name, attention in runs:
            print(f"training with {name} MLA ...", flush=True)
            run = train(name, attention, Path(scratch) / "first_weights.pt", args, on_gpu)
            report.rows.append(run)
            report.write(args.folder / f"{NAME}.json")
            print(report.line(run), flush=True)
    results(report).publish(args.folder, NAME)
    return 1 if any(run.error for run in report.rows) else 0


def _describe(args: argparse.Namespace, on_gpu: bool) -> dict:
    sizes = {"layers": args.layers, "heads": args.heads, "ffn-hidden-size": args.ffn_hidden_size}
    sizes |= dims_of(args)
    sizes |= {"vocabulary": args.vocab_size, "sequence": args.seq_length}
    return provenance.describe(
        on_gpu,
        "bfloat16" if on_gpu else "float32",
        gpus=args.gpus if on_gpu else 0,
        peak_tflops=args.peak_tflops if on_gpu else None,
        tokens_per_iteration=args.global_batch_size * args.seq_length,
        model=sizes,
        megatron=args.megatron,
    )


# ---- Megatron's command line


def megatron_arguments(args: argparse.Namespace, attention: str, on_gpu: bool) -> list[str]:
    """What Megatron is asked for; all runs get the same but for the attention.

    Args:
        args: The script's.
        attention: One of ``ATTENTIONS``.
        on_gpu: bf16 with TransformerEngine's layers, or fp32 with Megatron's local ones.
    """
    own = [*_model(args), *_training(args), *(_on_gpu() if on_gpu else _on_cpu())]
    if attention == "absorbed" or not on_gpu:
        own += ["--spec", *_SPECS[attention]]
    return own + args.megatron.split()


def _model(args: argparse.Namespace) -> list[str]:
    sizes = {f"--{name}": size for name, size in dims_of(args).items()}
    sizes |= {
        "--num-layers": args.layers,
        "--num-attention-heads": args.heads,
        "--ffn-hidden-size": args.ffn_hidden_size,
        "--vocab-size": args.vocab_size,
        "--seq-length": args.seq_length,
        "--max-position-embeddings": args.seq_length,
        "--rope-type": "rope",
        "--normalization": "RMSNorm",
        "--position-embedding-type": "rope",
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
    }
    switches = ["--multi-latent-attention", "--qk-layernorm", "--swiglu", "--no-rope-fusion"]
    switches += ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    return [*_flat(sizes), *switches]


def _training(args: argparse.Namespace) -> list[str]:
    options = {
        "--micro-batch-size": args.micro_batch_size,
        "--global-batch-size": args.global_batch_size,
        "--train-iters": args.iterations,
        "--lr": args.learning_rate,
        "--min-lr": args.learning_rate / 10,
        "--lr-warmup-iters": max(1, args.iterations // 10),
        "--lr-decay-style": "cosine",
        "--seed": args.seed,
        "--tokenizer-type": "NullTokenizer",
        "--eval-iters": 0,
        "--eval-interval": args.iterations + 1,
        "--log-interval": 1,
    }
    switches = ["--mock-data", "--no-create-attention-mask-in-dataloader", "--log-throughput"]
    # The first needs apex, the second looks for a logging package of NVIDIA's.
    switches += ["--no-gradient-accumulation-fusion", "--no-one-logger"]
    return [*_flat(options), *switches]


def _on_gpu() -> list[str]:
    return ["--bf16", "--transformer-impl", "transformer_engine"]


def _on_cpu() -> list[str]:
    switches = ["--no-persist-layer-norm", "--no-masked-softmax-fusion", "--use-cpu-initialization"]
    options = {"--transformer-impl": "local", "--distributed-backend": "gloo", "--num-workers": 0}
    # Clipping looks at the type's name, which says "cuda".
    return [*_flat(options | {"--clip-grad": 0}), *switches]


def _flat(options: dict) -> list[str]:
    return [str(part) for pair in options.items() for part in pair]


# ---- Megatron's log

_NUMBER = r"([-+0-9.eE]+|nan|inf)"
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_VALUES = {
    "seconds": re.compile(rf"elapsed time per iteration \(ms\): {_NUMBER}"),
    "tflops": re.compile(rf"throughput per GPU \(TFLOP/s/GPU\): {_NUMBER}"),
    "loss": re.compile(rf"lm loss: {_NUMBER}"),
    "grad_norm": re.compile(rf"grad norm: {_NUMBER}"),
}
_PEAK = re.compile(rf"max allocated: {_NUMBER}")
_PARAMETERS = re.compile(r"model parallel rank \(.*\): (\d+)")
# Printed by pretrain_gpt.py.
CHOSEN = "Core attention of ours ran:"
_CHOSEN = re.compile(rf"^{re.escape(CHOSEN)} (.+)$", re.MULTILINE)
# The line of Python that says what went wrong, with torchrun's prefix or without.
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)")


@dataclass(frozen=True)
class Iteration:
    """One line of the log.

    Attributes:
        iteration: From 1.
        loss: Per token, nats.
        seconds: Of the iteration.
        tflops: Of one GPU, by Megatron's count of operations.
        grad_norm: None where gradients are not clipped.
    """

    iteration: int
    loss: float
    seconds: float
    tflops: float
    grad_norm: float | None = None


def iterations(text: str) -> Iterator[Iteration]:
    """All lines of ``text`` that are of an iteration.

    After the first iteration Megatron prints a time without resetting it: the second's holds both.
    """
    for line in text.splitlines():
        head = _ITERATION.search(line)
        found = {name: pattern.search(line) for name, pattern in _VALUES.items()}
        if not head or found["loss"] is None or found["seconds"] is None:
            continue
        values = {name: float(match[1]) for name, match in found.items() if match}
        values["seconds"] /= 1e3
        yield Iteration(int(head[1]), **{"tflops": 0.0, **values})


def peak_bytes(text: str) -> int | None:
    """Most memory allocated on the GPU so far when Megatron last said so."""
    found = _PEAK.findall(text)
    return int(float(found[-1]) * 2**20) if found else None


def parameters(text: str) -> int | None:
    """Of the model."""
    found = _PARAMETERS.search(text)
    return int(found[1]) if found else None


def chosen_backends(text: str) -> str:
    """Form and backend of our attentions; empty for another's."""
    found = _CHOSEN.search(text)
    return found[1] if found else ""


def problem(text: str) -> str:
    """The first error's message, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        found = _ERROR.match(line)
        if found:
            return found[1]
    return lines[-1] if lines else "no output"


# ---- runs


@dataclass(frozen=True)
class Run:
    """What one training printed.

    Attributes:
        name: The attention's, with a number if it was trained more than once.
        attention: ``"standard"`` or ``"absorbed"``.
        iterations: Every iteration.
        skip: First iterations that are not in the throughput.
        parameters: Of the model.
        peak_bytes: Most memory allocated on the GPU; None without one.
        ran: Form and backend of our attentions; empty of another's, or if that was not recorded.
        error: Empty, or why the training did not end well.
    """

    name: str
    attention: str
    iterations: list[Iteration] = field(default_factory=list)
    skip: int = 0
    parameters: int | None = None
    peak_bytes: int | None = None
    ran: str = ""
    error: str = ""

    @property
    def case(self) -> str:
        """What the run is called in reports."""
        return self.name

    @property
    def timed(self) -> list[Iteration]:
        """The iterations that are in the throughput."""
        return self.iterations[self.skip :]

    @property
    def seconds(self) -> float:
        """Median of an iteration's."""
        return median(one.seconds for one in self.timed)

    @property
    def tflops(self) -> float:
        """Median of an iteration's, of one GPU."""
        return median(one.tflops for one in self.timed)


def train(name: str, attention: str, weights: Path, args: argparse.Namespace, on_gpu: bool) -> Run:
    """Train once, in processes of their own, which is how Megatron's loop ends.

    Args:
        name: Of the run, and of its log in the folder.
        attention: One of ``ATTENTIONS``.
        weights: File of the weights to begin with; written if it is not there.
        args: The script's.
        on_gpu: Whether there is a GPU.
    """
    option = "--first-weights" if weights.exists() else "--save-first-weights"
    command = [sys.executable]
    if args.gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.gpus)]
    command += [str(ENTRY), *megatron_arguments(args, attention, on_gpu), option, str(weights)]
    path = args.folder / f"{name}.log"
    error = run_command(command, path, args.timeout)
    text = path.read_text(errors="replace")
    lines = list(iterations(text))
    if not error and len(lines) < args.iterations:
        error = f"the log has {len(lines)} of {args.iterations} iterations"
    return Run(
        name=name,
        attention=attention,
        iterations=lines,
        skip=args.skip,
        parameters=parameters(text),
        peak_bytes=peak_bytes(text) if on_gpu else None,
        ran=chosen_backends(text),
        error=error,
    )


def run_command(command: list[str], path: Path, timeout: float) -> str:
    """Run, with the output in a file; returns what went wrong, or an empty string."""
    environment = {**_ALONE, "OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    with path.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=ends_with_this_process(),
        )
        try:
            code = process.wait(timeout)
        except BaseException as reason:
            # Asked to end, because only then torchrun ends its workers.
            process.terminate()
            process.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            return f"not over after {timeout:g} s"
    return problem(path.read_text(errors="replace")) if code else ""


# ---- report


class PretrainingReport(Report):
    """One call of the script; its rows are runs."""

    row = Run
    rows_key = "runs"

    def figures(self, run: Run) -> dict[str, float]:
        """Of the iterations that are timed, and the last loss."""
        peak = self.environment["peak_tflops"]
        return {
            "iteration_ms": 1e3 * run.seconds,
            "tokens_per_second": self.environment["tokens_per_iteration"] / run.seconds,
            "tflops": run.tflops,
            **({"mfu": run.tflops / peak} if peak else {}),
            **gibibytes(run),
            "first_loss": run.iterations[0].loss,
            "last_loss": run.iterations[-1].loss,
        }

    def differences(self) -> list[dict]:
        """Largest difference of the losses of each run and the one before it."""
        found = []
        for left, right in pairwise(self.measured):
            gaps = [abs(a.loss - b.loss) for a, b in zip(left.iterations, right.iterations)]
            last = [mean(one.loss for one in run.iterations[-10:]) for run in (left, right)]
            found.append(
                {
                    "runs": [left.name, right.name],
                    "largest": max(gaps),
                    "largest_at": 1 + gaps.index(max(gaps)),
                    "last": last[1] - last[0],
                }
            )
        return found

    def summary(self) -> dict:
        """With the differences of the losses."""
        return {**super().summary(), "differences": self.differences()}


def results(report: PretrainingReport) -> Results:
    """Everything that is shown."""
    differences = "\n".join(
        f"- {' and '.join(one['runs'])}: largest difference of the loss {one['largest']:.1e}, in "
        f"iteration {one['largest_at']}; of the mean of the last ten {one['last']:+.1e}"
        for one in report.differences()
    )
    return Results([report], panels(report), [differences])


def panels(report: PretrainingReport) -> list[Panel]:
    """Losses, and by how much they differ."""
    curves = {run.name: [(i.iteration, i.loss) for i in run.iterations] for run in report.measured}
    gaps = {
        f"{left.name} - {right.name}": [
            (a.iteration, a.loss - b.loss) for a, b in zip(left.iterations, right.iterations)
        ]
        for left, right in pairwise(report.measured)
    }
    plain = {"sizes": False, "marker": ""}
    return [
        Panel("loss per token (nats)", "iteration", curves, **plain),
        Panel("difference of the losses", "iteration", gaps, **plain),
    ]


if __name__ == "__main__":
    leave(main())
