#!/usr/bin/env python3
"""Measure attention over cached latents on one device: chunked prefill, and offloaded contexts.

    $ python scripts/bench_cached_attention.py docs/inference
    $ python scripts/bench_cached_attention.py /tmp/quick --suites offload --heads 16 --contexts 32k
    $ python scripts/bench_cached_attention.py docs/inference --render docs/inference/cached.json

Suite "prefill": some hundreds or thousands of new tokens over a long context, expanded in chunks,
beside the bare attention of the same size. Suite "offload": one decoded token of each request, a
part of the context in pinned host memory, beside all of it on the device and beside what the link
needs for the bytes. The dimensions are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32
(to try the script). A case that fails has its error in its row. The last line is JSON.
"""

from __future__ import annotations

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
from cached_benchmark.cases import SUITES, cases  # noqa: E402
from console.script import leave, run_script  # noqa: E402
from context_parallel_benchmark.arguments import (  # noqa: E402
    DIMS,
    add_dims,
    check_files,
    dims_of,
    list_of,
    new_parser,
    one_of,
    parse_sizes,
    seconds,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code, 2 after wrong input."""
    words = sys.argv[1:] if argv is None else argv
    return run_script("bench_cached_attention.py", lambda: _run(words))


def _run(argv: Sequence[str]) -> None:
    args = parse_arguments(argv)
    if args.render:
        render(args)
    else:
        measure_all(args)


def parse_arguments(argv: Sequence[str]):
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_cached_attention.py", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where cached.json, .md and .png go")
    add("--render", type=Path, nargs="+", metavar="FILE.json", help="measure nothing, render these")
    add("--suites", type=list_of(one_of(SUITES)), default=",".join(SUITES), help="what is measured")
    add("--device", choices=("cuda", "cpu"), help="where it runs (default: a GPU if there is one)")
    add("--heads", type=parse_sizes, default="128,16", help="of the attention")
    add("--contexts", type=parse_sizes, default="32k,128k", help="cached tokens")
    add("--queries", type=parse_sizes, default="512,2k,8k", help="new tokens")
    add("--batches", type=parse_sizes, default="1,8", help="requests that decode")
    add("--budget-ratio", type=int, default=4, help="context over what is resident")
    add("--context-chunk-size", type=int, default=2**16, help="of the attention")
    add("--seconds-per-row", type=seconds, default=0.3, help="repetitions")
    add("--seed", type=int, default=1234, help="of weights and inputs")
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.budget_ratio < 2:
        parser.error(f"--budget-ratio must be at least 2, got {args.budget_ratio}")
    check_files(args.folder, args.render or ())
    return args


def measure_all(args) -> None:
    """Measure every case, write what there is after each, and render.

    Raises:
        ValueError: If the device is not there.
    """
    import torch

    import provenance
    from absorbed_mla import AbsorbedMLAOptions
    from cached_benchmark.measure import Measurement
    from cached_benchmark.report import NAME, Report

    on_gpu = torch.cuda.is_available() if args.device is None else args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that PyTorch can use; try --device cpu")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if on_gpu else "cpu")
    options = AbsorbedMLAOptions(context_chunk_size=args.context_chunk_size)
    measurement = Measurement(dims_of(args), device, args.seconds_per_row, options)
    environment = {
        "date": provenance.today(),
        "command": " ".join(["python", "scripts/bench_cached_attention.py", *sys.argv[1:]]),
        "commit": provenance.commit(),
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "dtype": str(measurement.dtype).removeprefix("torch."),
        "itemsize": measurement.dtype.itemsize,
        "dims": dims_of(args),
        "link": measurement.link_bytes_per_second(),
        "versions": provenance.attention_versions(on_gpu),
    }
    report = Report(environment, [])
    for case in cases(args):
        report.rows.append(measurement(case))
        report.write(args.folder / f"{NAME}.json")
        print(f"{case}: {report.figures(report.rows[-1]) or report.rows[-1].error}", flush=True)
    publish_all(args.folder, [report])


def render(args) -> None:
    """Render reports that were written before."""
    from cached_benchmark.report import Report

    publish_all(args.folder, [Report.read(file) for file in args.render])


def publish_all(folder: Path, reports) -> None:
    """Write the tables and the plot, and print the tables and a last line of JSON."""
    from cached_benchmark import report

    publish(
        folder,
        report.NAME,
        report.markdown(reports),
        partial(report.plot, reports),
        (*report.tables(reports), report.errors(reports)),
        report.summary(reports),
    )


if __name__ == "__main__":
    leave(main())
