#!/usr/bin/env python3
"""Generate many requests with Megatron's dynamic engine: are the tokens right, and how fast?

    $ python scripts/bench_engine.py --json engine.json
    $ python scripts/bench_engine.py --batch-invariant --implementations ours
    $ NVIDIA_TF32_OVERRIDE=0 python scripts/bench_engine.py --dtype float32 --num-layers 2 \
          --heads 16 --requests 100
    $ python scripts/bench_engine.py --device cpu --hidden-size 64 --q-lora-rank 32 \
          --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --heads 4 \
          --ffn-hidden-size 64 --num-layers 2 --vocab-size 128 --requests 12 --longest-prompt 160 \
          --shared-prefix 70 --longest-output 40 --max-requests 8 --max-tokens 128

A model of random weights gets requests of mixed lengths at once, half of them with a beginning
that others share, in a cache that is too small for them: with prefix caching, chunked prefill,
preemption, and in half of the cases CUDA graphs. Our attention runs beside Megatron's standard MLA
in the same engine, where that runs; where it does not, its error is its row. Then: no block of the
cache is lost, everything named above has happened, and every request has the tokens that it has
alone in an eager engine. In bfloat16 a batch of another size is rounded in another way; where the
two part, a whole forward must say that both tokens were within --tie of the likeliest; with
--batch-invariant they must not part. The exit code is 1 if ours is not so. On a CPU (to try the
script) graphs are the host's bookkeeping only. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore")

from console.script import leave, run_script  # noqa: E402
from engine_benchmark.arguments import cases, parse_arguments  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code: 1 where ours is wrong, 2 after wrong input."""
    words = sys.argv[1:] if argv is None else argv
    return run_script("bench_engine.py", lambda: measure_all(parse_arguments(words, __doc__)))


def measure_all(args) -> int:
    """Measure every case, and write what there is after each.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    if args.device == "cpu":
        # Before torch looks: Megatron asks it for the device in many places.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Only here, so that --help needs no torch.
    from engine_benchmark.machine import Machine
    from engine_benchmark.measure import Bench
    from engine_benchmark.workload import workload

    machine = Machine(args, begin)
    requests = workload(args)
    bench = Bench(args, machine, requests)
    report = {
        "environment": machine.describe(args),
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "asked_for": sum(request.num_tokens for request in requests),
        "blocks": bench.blocks,
        "rows": [],
    }
    rows = []
    for case in cases(args):
        rows.append(bench.measure(case))
        report["rows"].append(rows[-1].as_json())
        print(f"{machine.elapsed:5.1f} s  {rows[-1]}", flush=True)
        if args.json:
            write(args.json, report)
    print(json.dumps(report))
    machine.leave()
    return int(not all(row.ok for row in rows if row.case.implementation == "ours"))


def write(path: Path, report: dict) -> None:
    """Either the whole file is there or the former one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    leave(main())
