"""Training runs as processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from console.parent import ends_with_this_process
from pretraining_benchmark import log
from pretraining_benchmark.arguments import megatron_arguments

# A world of one process, where nobody listens; torchrun replaces it.
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
_ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
ENTRY = Path(__file__).with_name("pretrain_gpt.py")


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
    iterations: list[log.Iteration] = field(default_factory=list)
    skip: int = 0
    parameters: int | None = None
    peak_bytes: int | None = None
    ran: str = ""
    error: str = ""

    @property
    def timed(self) -> list[log.Iteration]:
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

    @classmethod
    def from_json(cls, content: dict) -> Run:
        """The inverse of ``dataclasses.asdict``."""
        lines = [log.Iteration(**one) for one in content["iterations"]]
        return cls(**{**content, "iterations": lines})

    def as_json(self) -> dict:
        """All fields."""
        return asdict(self)


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
    error = _run(command, path, args.timeout)
    text = path.read_text(errors="replace")
    lines = list(log.iterations(text))
    if not error and len(lines) < args.iterations:
        error = f"the log has {len(lines)} of {args.iterations} iterations"
    return Run(
        name=name,
        attention=attention,
        iterations=lines,
        skip=args.skip,
        parameters=log.parameters(text),
        peak_bytes=log.peak_bytes(text) if on_gpu else None,
        ran=log.chosen_backends(text),
        error=error,
    )


def _run(command: list[str], path: Path, timeout: float) -> str:
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
    return log.problem(path.read_text(errors="replace")) if code else ""
