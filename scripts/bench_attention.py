#!/usr/bin/env python3
"""Measure MLA on one GPU: whole layers beside Megatron's own, and attention beside its peers.

    $ python scripts/bench_attention.py docs/attention
    $ python scripts/bench_attention.py /tmp/quick --quick --suite layer --layouts sbhd
    $ python scripts/bench_attention.py /tmp/absorbed --form absorbed --heads 16 --seq-lens 8k
    $ python scripts/bench_attention.py docs/attention --render one.json other.json

Suite "layer": AbsorbedMLASelfAttention, with and without recomputation of mla_up_proj, beside
Megatron's MLASelfAttention of TransformerEngine's layers: time of forward and of a step, memory
kept for backward, peak. Suite "core": the attention without projections, expanded and absorbed, by
our backends, PyTorch's, TransformerEngine's and FlashAttention's; what refuses says why. The
dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32 (to try the script:
--device cpu with small dimensions). Layers come first, of these the recomputed ones, each beside
Megatron's with the same recomputation: what --time-limit leaves out matters least. A case that
fails has its error in its row, and the others go on. What was measured is written after every case.
The last line of the output is JSON.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from attention_benchmark.arguments import (  # noqa: E402
    core_cases,
    layer_cases,
    parse_arguments,
    require_device,
)
from attention_benchmark.plot import plot  # noqa: E402
from attention_benchmark.report import (  # noqa: E402
    NAME,
    Report,
    brief,
    errors,
    markdown,
    summary,
    targets,
)
from attention_benchmark.terminal import print_tables  # noqa: E402
from benchmark_report import publish  # noqa: E402
from console.script import leave, run_script  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    return run_script("bench_attention.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    args = parse_arguments(argv, __doc__)
    if args.render:
        render(args.folder, [Report.read(file) for file in args.render])
    else:
        measure_all(args)


def measure_all(args) -> None:
    """Measure every case, write what there is after each, and render.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    if args.device == "cpu":
        # Before torch looks: Megatron asks it for the device in many places.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Only here, so that rendering needs no machine to measure on.
    import torch

    device = require_device(args, torch.cuda.is_available())
    from attention_benchmark.core import IMPLEMENTATIONS
    from attention_benchmark.machine import Bench

    bench = Bench(args, device, begin)
    report = Report(bench.describe(), [])
    for case in [*layer_cases(args), *core_cases(args, IMPLEMENTATIONS)]:
        report.rows.append(bench.measure(case))
        report.write(args.folder / f"{NAME}.json")
        print(f"{bench.elapsed:5.1f} s  {brief(report.rows[-1], report)}", flush=True)
    render(args.folder, [report])
    # Last: a device that a kernel's fault took away may not answer.
    bench.leave()


def render(folder: Path, reports: Sequence[Report]) -> None:
    """Write the tables and the plot, and print the tables and a last line of JSON."""
    print_tables(reports)
    parts = (targets(reports), errors(reports))
    draw = partial(plot, reports)
    publish(folder, NAME, markdown(reports), draw, parts, summary(reports))


if __name__ == "__main__":
    leave(main())
