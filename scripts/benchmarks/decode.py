#!/usr/bin/env python3
r"""Measure decode: absorbed attention of new tokens over a paged latent cache, ours beside others'.

    $ python scripts/bench_decode.py --json docs/decode.json --plot docs/decode.png
    $ python scripts/bench_decode.py --quick --heads 16
    $ python scripts/bench_decode.py --implementations "ours, triton" --kv 8k --block-sizes 1,100
    $ python scripts/bench_decode.py --device cpu --heads 2 --batches 2 --kv 100 --block-sizes 16 \
          --kv-lora-rank 32 --qk-pos-emb-head-dim 16

Rows are requests of equal length, with --uneven of any length too, whose blocks lie scattered.
Others are FlashMLA, FlashInfer and vLLM's kernels, where they can be imported; what refuses or is
not there says why, and what is measured is compared with the reference in fp32. The widths are
DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. On a GPU a call is recorded as a CUDA
graph where it lets itself be, and the L2 cache is overwritten before every repetition, outside of
the time. A call counts

    pairs = sum(kv * s_q - s_q * (s_q - 1) / 2)           causal inside the new tokens
    FLOP  = heads * pairs * 2 * (2 * kv_lora_rank + rope) scores and values
    bytes = sum(kv) * (kv_lora_rank + rope) * width       the latents, read once

whose rates are to be held against a product's and a copy's (read and written), measured in the same
run. The table goes to stderr; the last line of the output is JSON.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

from attention_benchmark.arguments import require_device  # noqa: E402
from console.script import leave, run_script  # noqa: E402
from decode_benchmark.arguments import cases, parse_arguments  # noqa: E402
from decode_benchmark.report import Report, brief, print_table, summary  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code, 2 after wrong input."""
    return run_script("bench_decode.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    args = parse_arguments(argv, __doc__)
    if args.render:
        show(Report.read(args.render), args)
    else:
        measure_all(args)


def measure_all(args) -> None:
    """Measure every case, writing what there is after each.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    if args.device == "cpu":
        # Before torch looks: Megatron asks it for the device in many places.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Only here, so that --help needs no torch.
    import torch

    device = require_device(args, torch.cuda.is_available())
    from decode_benchmark.measure import Bench

    bench = Bench(args, device, begin)
    report = Report(bench.describe(), [])
    for case in cases(args, device):
        report.rows.append(bench.measure(case))
        if args.json:
            report.write(args.json)
        print(f"{bench.elapsed:5.1f} s  {brief(report, report.rows[-1])}", file=sys.stderr)
    show(report, args)


def show(report: Report, args) -> None:
    """Print the table and a last line of JSON, and draw what is asked for."""
    print_table(report)
    if args.plot:
        from decode_benchmark.plot import plot

        if not plot(report, args.plot):
            print("No plot: matplotlib is missing, or nothing was measured.", file=sys.stderr)
    print(summary(report))


if __name__ == "__main__":
    leave(main())
