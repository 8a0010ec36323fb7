#!/usr/bin/env python3
"""Run the smallest GPU case of every benchmark, each in a process of its own: do they still run?

    $ python scripts/benchmarks/smoke.py
    $ python scripts/benchmarks/smoke.py --only decode --logs logs

As many run side by side as the cores allow; times mean nothing. What needs more GPUs than there
are, or a package that is not installed, is skipped by name. Output, a line each:

    21.3 s  decode: ok
     0.0 s  layer beside Megatron's: skipped, it needs transformer_engine

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
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit.arguments import seconds
from benchmarks.kit.command import run_to_log
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

# Cores that one of them keeps busy, compilers included.
_CORES = 3
# What a row says of an error that is no refusal.
_FAILED = re.compile(r"(rank \d+: )?\w*(Error|Exception): ")
_SMALL, _JSON = "--heads 16 --seq-lens 1k", "--json {out}/a.json"
_LAYER = f"{{out}} --suite layer {_SMALL} --seconds-per-row 0.05"
_DECODE = "--heads 16 --batches 4 --kv 1k --query-lengths 1 --block-sizes 64 --seconds-per-row 0.01"
_SPARSE = "--heads 16 --queries 256 --topk 512 --kv 2k"
_PREFIX = "{out} --heads 16 --prompt 256 --answers 4 --answer 128"
_RING = "{out} --sizes 2k --heads 16 --layouts sbhd,thd"
_STEPS = "{out} --rows v3/1k,v3/1k/thd --scale-down 4 --vocab-size 512"
_RESHARDED = "--scale-down 4 --vocab-size 512 --moe-layers 1 --experts 4"
_SERVED = "--scale-down 4 --vocab-size 512 --dense-layers 1 --moe-layers 1 --experts 4 --repeats 1"


class Smoke(NamedTuple):
    """One benchmark's smallest case on a GPU."""

    name: str
    script: str
    options: str  # {out} is a folder of its own
    needs: str = "1"  # GPUs, or a package


# What takes longest comes first: name | script | options | what it needs, if not one GPU.
SMOKES = tuple(
    Smoke(*(part.strip() for part in line.split("|")))
    for line in f"""
serving | serving | {_SERVED} --implementations ours,ours-parity --rows 2x64/8,2x40/6*2 {_JSON}
layer | attention | {_LAYER} --only ours
core attention | attention | {{out}} --suite core {_SMALL} --seconds-per-row 0.02
decode | decode | {_DECODE} --lengths equal,one_long {_JSON}
sparse attention | dsa | {_SPARSE} --indexer 4k --seconds-per-row 0.01 {_JSON}
long contexts | long_context | --sizes 4k --cp 8 --heads 16 --topk 512 {_JSON}
shared prefixes | shared_prefix | {_PREFIX} --rounds 1 --ffn-hidden-size 1024
features | attention_features | {{out}} {_SMALL} --rounds 1
context parallelism | context_parallel | {_RING} --seconds-per-row 0.1 | 2
resharding | resharding | {_RESHARDED} --seconds-per-row 0.1 {_JSON} | 2
weight updates | weight_updates | {_SERVED} {_JSON}
training steps | training_step | {_STEPS} --warm-ups 1 --steps 2 | transformer_engine
layer beside Megatron's | attention | {_LAYER} --precisions bf16,tensorwise | transformer_engine
serving beside vLLM | serving | {_SERVED} --implementations ours,vllm --rows 2x64/8 {_JSON} | vllm
""".strip().splitlines()
)


def main(argv: list[str] | None = None) -> int:
    """Run all of them; returns the exit code."""
    parser = Parser("smoke.py", __doc__ or "")
    add = parser.add_argument
    add("--only", metavar="TEXT", help="run only those with this in their name")
    add("--limit", type=seconds, default=200.0, help="seconds after which one has failed")
    add("--logs", type=Path, metavar="FOLDER", help="where output stays (default: temporary)")
    return run_script("smoke.py", lambda: _run(parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> int:
    require_writable(folders={"--logs": args.logs})
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        raise ValueError("smoke.py needs a GPU, and there is none")
    with tempfile.TemporaryDirectory() as temporary:
        logs = args.logs or Path(temporary)

        def failed(one: Smoke) -> bool:
            begin, lacking = time.monotonic(), missing(one, gpus)
            error = "" if lacking else measure(one, logs, args.limit)
            verdict = f"failed: {error}" if error else f"skipped, {lacking}" if lacking else "ok"
            print(f"{time.monotonic() - begin:5.1f} s  {one.name}: {verdict}", flush=True)
            return bool(error)

        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // _CORES)) as pool:
            chosen = [one for one in SMOKES if (args.only or "") in one.name]
            return int(any([*pool.map(failed, chosen)]))


def missing(one: Smoke, gpus: int) -> str:
    """What it needs and does not have."""
    if one.needs.isdecimal():
        return f"it needs {one.needs} GPUs" if int(one.needs) > gpus else ""
    return "" if find_spec(one.needs) else f"it needs {one.needs}"


def measure(one: Smoke, logs: Path, limit: float) -> str:
    """Run it; returns why it failed, empty if it did not."""
    out = logs / one.name.replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={one.needs}"]
    command = [sys.executable, *(launcher if one.needs.isdecimal() and one.needs != "1" else ())]
    command += [str(Path(__file__).with_name(f"{one.script}.py"))]
    command += shlex.split(one.options.format(out=shlex.quote(str(out))))
    code = run_to_log(command, out / "log", limit)
    lines = (out / "log").read_text(errors="replace").splitlines() or ["no output"]
    if code is None:
        return f"not over after {limit:g} s"
    return problem(lines) if code == 0 else f"exit code {code}: {lines[-1]}"


def problem(lines: list[str]) -> str:
    """Of a benchmark that ended well: a row that failed, not one that was refused."""
    try:
        [report] = json.loads(lines[-1])
        rows = report["rows"]
    except (ValueError, KeyError, TypeError):
        return f"its last line is no report: {lines[-1][:100]}"
    errors = [row.get("error", "") for row in rows]
    if all(errors):
        return f"no figures: {errors[0]}"
    return next(filter(_FAILED.match, errors), "")


if __name__ == "__main__":
    leave(main())
