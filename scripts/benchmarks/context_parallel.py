#!/usr/bin/env python3
"""Measure one attention layer under context parallelism, ours beside Megatron's own.

    $ torchrun --nproc-per-node 2 scripts/bench_context_parallel.py docs/context-parallel --profile
    $ torchrun --nproc-per-node 2 scripts/bench_context_parallel.py /tmp/quick \
          --sizes 64,128 --heads 4 --hidden-size 64 --q-lora-rank 32 --kv-lora-rank 32
    $ python scripts/bench_context_parallel.py docs/context-parallel --render two.json four.json

All processes are one context-parallel group. For every sequence length, number of heads and layout
it measures step time, memory and the bytes that a rank really sends. The dimensions are
DeepSeek-V3's; GPUs compute in bfloat16, CPUs in float32. A case that fails (memory, or something
unsupported) has its error in its row, and the others go on; only if one rank fails alone in the
middle of a step, the run ends after --timeout. What was measured is written after every case. The
last line of the output is JSON.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from benchmark_report import publish  # noqa: E402
from console.script import leave, run_script  # noqa: E402
from context_parallel_benchmark.arguments import cases, parse_arguments  # noqa: E402
from context_parallel_benchmark.plot import plot  # noqa: E402
from context_parallel_benchmark.report import (  # noqa: E402
    NAME,
    Report,
    errors,
    markdown,
    summary,
    table,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    words = sys.argv[1:] if argv is None else argv
    return run_script("bench_context_parallel.py", lambda: _run(words))


def _run(argv: Sequence[str]) -> None:
    args = parse_arguments(argv, __doc__)
    if args.render:
        render(args.folder, [Report.read(file) for file in args.render])
    else:
        measure_all(args)


def measure_all(args) -> None:
    """Measure every case on all processes; rank 0 writes.

    Raises:
        ValueError: If the cases cannot be cut over the processes.
    """
    wanted = cases(args, int(os.environ.get("WORLD_SIZE", 1)))
    # Only here, so that rendering needs no machine to measure on.
    from context_parallel_benchmark.machine import describe
    from context_parallel_benchmark.measure import measure
    from context_parallel_benchmark.processes import Processes

    processes = Processes(args.seed, args.timeout)
    if args.profile and not processes.on_gpu and processes.rank == 0:
        print("--profile has no effect: there is no GPU.")
    report = Report(describe(args, processes), [])
    for case in wanted:
        row = measure(case, args, processes)
        report.rows.append(row)
        if processes.rank == 0:
            report.write(args.folder / f"{NAME}.json")
            line = [Report(report.environment, [row])]
            print(errors(line).splitlines()[-1] if row.error else table(line).splitlines()[-1])
            sys.stdout.flush()
    if processes.rank == 0:
        render(args.folder, [report])
    processes.leave()


def render(folder: Path, reports: Sequence[Report]) -> None:
    """Write the table and the plot, and print the table and a last line of JSON."""
    parts = (table(reports), errors(reports))
    draw = partial(plot, reports)
    publish(folder, NAME, markdown(reports), draw, parts, summary(reports))


if __name__ == "__main__":
    leave(main())
