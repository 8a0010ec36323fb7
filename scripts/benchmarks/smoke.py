#!/usr/bin/env python3
"""Run the smallest GPU case of every benchmark, each in a process of its own: do they still run?

    $ python scripts/benchmarks/smoke.py
    $ python scripts/benchmarks/smoke.py --only decode --logs logs

As many run side by side as the cores allow; times mean nothing. What needs more GPUs than there
are, or a package that is not installed, is skipped by name. Output, a line each:

    21.3 s  decode: ok
     0.0 s  pretraining: skipped, it needs transformer_engine

The exit code is 1 if one failed: ended with an error, took longer than --limit, or has a row that
was not refused and has no figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit.arguments import count, seconds
from benchmarks.kit.command import run_to_log
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

FOLDER = Path(__file__).parent
# Cores that one of them keeps busy, compilers included.
_CORES = 3
# What a row says of an error that is no refusal.
_FAILED = re.compile(r"(rank \d+: )?\w*(Error|Exception): ")


@dataclass(frozen=True)
class Smoke:
    """One benchmark's smallest case on a GPU."""

    name: str
    script: str  # file
    options: str  # {out} is a folder of its own
    gpus: int = 1  # that it needs
    package: str = ""  # that it needs, too


SMOKES = (
    Smoke(
        "serving",
        "serving.py",
        "--implementations ours,ours-parity --rows 2x64/8,2x40/6*2 --scale-down 8 --vocab-size 512 "
        "--dense-layers 1 --moe-layers 1 --experts 4 --max-num-batched-tokens 256 --repeats 1 "
        "--json {out}/serving.json",
    ),
    Smoke(
        "layer",
        "attention.py",
        "{out} --suite layer --heads 16 --seq-lens 1k --seconds-per-row 0.05 --only ours",
    ),
    Smoke(
        "layer beside Megatron's",
        "attention.py",
        "{out} --suite layer --heads 16 --seq-lens 1k --layouts sbhd --seconds-per-row 0.05 "
        "--precisions bf16,tensorwise",
        package="transformer_engine",
    ),
    Smoke(
        "core attention",
        "attention.py",
        "{out} --suite core --heads 16 --seq-lens 1k --seconds-per-row 0.02",
    ),
    Smoke(
        "decode",
        "decode.py",
        "--heads 16 --batches 4 --kv 1k --query-lengths 1 --block-sizes 64 --seconds-per-row 0.01 "
        "--lengths equal,one_long --json {out}/decode.json",
    ),
    Smoke(
        "sparse attention",
        "dsa.py",
        "--heads 16 --queries 256 --topk 512 --kv 2k --indexer 4k --seconds-per-row 0.01 "
        "--json {out}/dsa.json",
    ),
    Smoke(
        "context parallelism",
        "context_parallel.py",
        "{out} --sizes 2k --heads 16 --layouts sbhd,thd --seconds-per-row 0.1",
        gpus=2,
    ),
    Smoke("conversion", "conversion.py", "{out} --sizes 20MB --repeat 1 --work-folder {out}"),
    Smoke(
        "pretraining",
        "pretraining.py",
        "{out} --iterations 4 --skip 1 --layers 1 --seq-length 256 --ffn-hidden-size 512 "
        "--vocab-size 1024",
        package="transformer_engine",
    ),
    Smoke(
        "serving beside vLLM",
        "serving.py",
        "--implementations ours,vllm --rows 2x64/8 --scale-down 8 --vocab-size 512 "
        "--dense-layers 1 --moe-layers 1 --experts 4 --repeats 1 --json {out}/serving.json",
        package="vllm",
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run all of them; returns the exit code."""
    parser = Parser("smoke.py", __doc__ or "")
    add = parser.add_argument
    add("--only", metavar="TEXT", help="run only those with this text in their name")
    add("--limit", type=seconds, default=200.0, help="seconds after which one has failed")
    add("--gpus", type=count, help="number of GPUs (default: those that PyTorch sees)")
    add("--logs", type=Path, metavar="FOLDER", help="where output stays (default: temporary)")
    return run_script("smoke.py", lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    require_writable(folders={"--logs": args.logs})
    chosen = [one for one in SMOKES if (args.only or "") in one.name]
    if not chosen:
        parts = ", ".join(one.name for one in SMOKES)
        raise ValueError(f"--only must be a part of one of {parts}; got {args.only!r}")
    gpus = args.gpus or _visible_gpus()
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)

        def run(one: Smoke) -> bool:
            begin = time.monotonic()
            error = missing(one, gpus)
            verdict = f"skipped, {error}"
            if not error:
                error = _measure(one, logs, args.limit)
                verdict = f"failed: {error}" if error else "ok"
            print(f"{time.monotonic() - begin:5.1f} s  {one.name}: {verdict}", flush=True)
            return verdict.startswith("failed")

        side_by_side = max(1, (os.cpu_count() or 1) // _CORES)
        with ThreadPoolExecutor(side_by_side) as pool:
            return int(any(list(pool.map(run, chosen))))


def _visible_gpus() -> int:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("smoke.py needs a GPU, and there is none")
    return torch.cuda.device_count()


def missing(one: Smoke, gpus: int) -> str:
    """What it needs and does not have."""
    if one.gpus > gpus:
        return f"it needs {one.gpus} GPUs"
    if one.package and find_spec(one.package) is None:
        return f"it needs {one.package}"
    return ""


def _measure(one: Smoke, logs: Path, limit: float) -> str:
    """Why it failed; empty if it did not."""
    out, log = logs / one.name.replace(" ", "-"), logs / f"{one.name.replace(' ', '-')}.log"
    out.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={one.gpus}"]
    command = [sys.executable, *(launcher if one.gpus > 1 else ()), str(FOLDER / one.script)]
    command += shlex.split(one.options.format(out=shlex.quote(str(out))))
    code = run_to_log(command, log, limit)
    lines = log.read_text(errors="replace").splitlines() or ["no output"]
    if code is None:
        return f"not over after {limit:g} s"
    return problem(lines) if code == 0 else f"exit code {code}: {lines[-1]}"


def problem(lines: list[str]) -> str:
    """Of a benchmark that ended well: a row that failed, not one that was refused."""
    try:
        [report] = json.loads(lines[-1])
        rows = report.get("rows") or report["runs"]
    except (ValueError, KeyError, TypeError):
        return f"its last line is no report: {lines[-1][:100]}"
    errors = [row.get("error", "") for row in rows]
    if all(errors):
        return f"no figures: {errors[0]}"
    return next(filter(_FAILED.match, errors), "")


if __name__ == "__main__":
    leave(main())
