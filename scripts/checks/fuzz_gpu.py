#!/usr/bin/env python3
"""Run random cases of every kernel on a GPU, and compare them with PyTorch in fp64.

    $ python scripts/checks/fuzz_gpu.py --seconds 540 --output fuzz.json
    $ python scripts/checks/fuzz_gpu.py --only paged-hopper,_choice_kernel --seconds 60 --seed 7
    $ python scripts/checks/fuzz_gpu.py --only choose-experts --case 0.12.3   # one case again
    $ python scripts/checks/fuzz_gpu.py --render docs/measurements/gpu-fuzz/h100.json

A process draws a configuration of a family of kernels (dtypes, widths, heads, block sizes: what
kernels are compiled for), then runs cases with it: lengths, batches, packs, values. Processes
compile side by side and share the GPU. Memory that kernels are given is full of NaN before they
write to it. A case fails if a result is further from fp64 than rounding explains, if another token,
expert or key was chosen, if an exception is raised, or if its process dies. What rounding explains
is in scripts/checks/fuzz/compare.py, and at the top of each file of families/.

Each failure comes with the command that repeats its case. The exit code is 1 if a case failed, or
if a kernel of the families that ran was not launched.

Without a GPU, and with TRITON_INTERPRET=1, Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit.report import write_json
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

_PACKAGES = ("torch", "triton")


def main(argv: list[str] | None = None) -> int:
    """Run cases, repeat one, or print former results; returns the exit code."""
    return run_script("fuzz_gpu.py", lambda: _run(_parser().parse_args(argv)))


def _parser() -> Parser:
    parser = Parser("fuzz_gpu.py", __doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="how long cases may begin")
    parser.add_argument("--seed", type=int, default=0, help="of all cases")
    only = "families, or kernels by the end of their names, with commas between them"
    parser.add_argument("--only", default=None, help=f"{only} (default: all)")
    parser.add_argument("--case", default=None, help="SEED.CONFIGURATION.NUMBER of one family")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=jobs, help="processes (default: one a core)")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    parser.add_argument("--render", type=Path, default=None, help="print a former --output")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.seconds <= 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    if args.render is not None:
        return _render(args.render)
    require_writable(files={"--output": args.output})
    names = args.only.split(",") if args.only is not None else None
    if args.case is None:
        return _fuzz(args, names)
    return _repeat(names, args.case)


def _render(file: Path) -> int:
    from checks.fuzz.results import rendered

    if not file.is_file():
        raise ValueError(f"--render must be a file of --output, got {file}")
    print(rendered(json.loads(file.read_text())))
    return 0


def _families(names: list[str] | None):
    """The families of these names, and those of them that cannot run here."""
    import torch

    # Megatron warns about every optional package it does not find.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    from checks.fuzz.family import all_families, named

    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        raise ValueError("it needs a GPU, or TRITON_INTERPRET=1 to interpret Triton's kernels")
    families = named(all_families(), names)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    left_out = [name for name, family in families.items() if family.hopper and not hopper]
    return {n: f for n, f in families.items() if n not in left_out}, left_out


def _fuzz(args: argparse.Namespace, names: list[str] | None) -> int:
    from checks.fuzz.results import Results, family_table, summary
    from checks.fuzz.runner import Runner

    families, left_out = _families(names)
    if not families:
        raise ValueError(f"--only {args.only}: these kernels need compute capability 9.0")
    start = time.monotonic()
    results, shown = Results(families, left_out, _about(args)), 0

    def progress(seconds: float) -> None:
        nonlocal shown
        for failure in results.failures[shown:]:
            print(f"FAILED {failure['family']} {failure['configuration']}")
            print(f"  {failure['error'][:600]}\n  {failure['command']}", flush=True)
        shown = len(results.failures)
        print(f"{seconds:.0f} s: {results.cases} cases, {shown} failures", flush=True)
        if args.output is not None:
            write_json(args.output, results.report(time.monotonic() - start))

    Runner(args.seed, args.seconds, args.jobs, results, progress).run()
    seconds = time.monotonic() - start
    progress(seconds)
    report = results.report(seconds)
    print(family_table(report))
    if left_out:
        print(f"left out, they need compute capability 9.0: {', '.join(left_out)}")
    if report["not launched"]:
        print(f"not launched by any case: {', '.join(report['not launched'])}")
    print(summary(report))
    return int(bool(report["failures"] or report["not launched"]))


def _about(args: argparse.Namespace) -> dict:
    import torch

    from benchmarks.kit import provenance

    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else provenance.processor()
    versions = provenance.versions(_PACKAGES)
    if on_gpu:
        versions["cuda"] = torch.version.cuda or "unknown"
    about = {"device": device, "versions": versions, "seed": args.seed, "jobs": args.jobs}
    return {**provenance.source(), **about}


def _repeat(names: list[str] | None, text: str) -> int:
    """Run one case in this process, and let its error through."""
    from checks.fuzz.case import CaseId, run_case
    from checks.fuzz.runner import prepare_device

    case, (families, left_out) = CaseId.parse(text), _families(names)
    if len(families) + len(left_out) != 1:
        raise ValueError(f"--case needs --only with one family, got {', '.join(families)}")
    if left_out:
        raise ValueError(f"{left_out[0]} needs compute capability 9.0")
    [family] = families.values()
    outcome = run_case(family, case, prepare_device(), with_traceback=True)
    print(f"{family.name} {case} {outcome.configuration}, {outcome.seconds:.1f} s")
    print(f"launched: {', '.join(outcome.launched)}")
    print(outcome.error or f"as fp64; largest error / tolerance {outcome.worst:.3f}")
    return int(outcome.error is not None)


if __name__ == "__main__":
    leave(main())
