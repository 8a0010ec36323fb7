#!/usr/bin/env python3
"""Run the tests that say something on a GPU, on one GPU or over several, side by side.

    $ bash scripts/checks/run_gpu_tests.sh gpu_results                        # on one GPU
    $ bash scripts/checks/run_gpu_tests.sh --gpus 2 --shard 1/2 gpu_results   # half of those on two

--gpus 1 runs tests/unit and, with one process, tests/distributed; more GPUs run tests/distributed
with as many processes, and the unit tests that use several GPUs. What no GPU changes is left out:
tests/conversion, tests/training, tests/readme, tests/old_megatron, and of tests/unit project,
scripts, testing, serving/server and the files of CPU_ONLY in scripts/checks/gpu_tests/plan.py.

Compiling kernels takes most of the time of short tests, so files run in processes of their own at
the same time, the longest first; those that disturb others run last, alone. What
has not ended after --seconds is killed, so that a call with a time limit returns its results.

Needs CUDA torch, megatron-core, einops, safetensors, transformers, pytest and hypothesis; uses
TransformerEngine where it is installed. OUTPUT_DIR gets summary.json (counts, seconds, reasons of
skips, first lines of failures by file; GPU and versions), a log for each process, the errors
against the oracle (errors.jsonl), and seconds.json, which belongs into scripts/checks/gpu_tests/.
The exit code is 1 if a test failed, a process ended otherwise than by its tests, or time ran out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit import provenance
from benchmarks.kit.report import write_json
from checks.gpu_tests.plan import Job, jobs_of, known_seconds, shard_of
from checks.gpu_tests.processes import FileResult, Limits, run_jobs, seconds_by_file
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "transformers", "pytest")
_LINES_OF_A_LOG = 40
_COUNTS = ("passed", "failed", "skipped")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests; returns the exit code."""
    return run_script("run_gpu_tests.py", lambda: _run(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("run_gpu_tests.py", __doc__)
    add = parser.add_argument
    folder = "folder of the results (default: gpu_test_results)"
    add("output_dir", type=Path, nargs="?", default=Path("gpu_test_results"), help=folder)
    gpus = "that a distributed test uses, one process each (default: all, at most 4)"
    add("--gpus", type=int, choices=(1, 2, 4), help=gpus)
    add("--shard", default="1/1", help="part K/N of the files, K from 1 to N")
    only = "regular expression: run files whose path has a match (default: all)"
    add("--only", default=".", help=only)
    jobs = "commands at the same time (default: by cores and processes of a command)"
    add("--jobs", type=int, help=jobs)
    add("--job-seconds", type=float, default=300, help="a command that takes longer is killed")
    add("--seconds", type=float, default=540, help="after these everything is killed")
    memory = "GiB of a GPU that PyTorch may allocate in one process, 0: all; alone, it may take all"
    add("--memory-gib", type=float, default=12, help=memory)
    add("--list", action="store_true", help="print the commands' files and run nothing")
    args = parser.parse_args(argv)
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", args.shard)
    if not shard or int(shard[1]) > int(shard[2]):
        parser.error(f"--shard must be K/N with K from 1 to N, got {args.shard}")
    args.shard = int(shard[1]), int(shard[2])
    for name in ("jobs", "job_seconds", "seconds"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be above 0, got {getattr(args, name)}")
    require_writable(folders={"OUTPUT_DIR": args.output_dir})
    return args


def _run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    if args.list:
        for job in _jobs(args, args.gpus or 1):
            print(f"{job.seconds:6.0f}s {job.processes or 1} {' '.join(job.tests or job.files)}")
        return 0
    environment = _environment()
    visible = environment["gpus"]
    if not visible:
        raise ValueError(
            "no CUDA GPU is visible to torch; scripts/run_tests.sh runs the tests on a CPU"
        )
    gpus = args.gpus or max(count for count in (1, 2, 4) if count <= visible)
    if gpus > visible:
        raise ValueError(f"--gpus must be at most the number of GPUs, {visible}, got {gpus}")
    jobs = _jobs(args, gpus)
    if not jobs:
        raise ValueError(f"--only {args.only!r} and --shard leave no files")
    folder = args.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    together = args.jobs or _together(gpus)
    limits = Limits(together, args.job_seconds, args.seconds, args.memory_gib)
    print(json.dumps(environment))
    print(f"{len(jobs)} commands, up to {together} at the same time", flush=True)
    results = run_jobs(
        jobs, folder, limits, range(visible), lambda one: print(one.line(), flush=True)
    )
    wall = round(time.monotonic() - begin, 1)
    _write(folder, args.shard, environment, gpus, wall, results)
    print("\n".join(_summary(folder, wall, results)))
    return int(any(one.is_bad for one in results))


def _jobs(args: argparse.Namespace, gpus: int) -> list[Job]:
    jobs = [
        job
        for job in jobs_of(ROOT, gpus, known_seconds(gpus))
        if any(re.search(args.only, name) for name in job.files)
    ]
    return shard_of(jobs, *args.shard)


def _together(gpus: int) -> int:
    """Commands at the same time: each process compiles, and torchrun waits."""
    cores = os.cpu_count() or 1
    return max(1, cores - 2) if gpus == 1 else max(1, cores // (2 * gpus))


def _environment() -> dict:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gpu": torch.cuda.get_device_name(0) if gpus else None,
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "versions": provenance.versions(_PACKAGES),
        **provenance.source(),
    }


def _write(
    folder: Path,
    shard: tuple[int, int],
    environment: dict,
    gpus: int,
    wall: float,
    results: Sequence[FileResult],
) -> None:
    """summary.json and seconds.json."""
    totals = {name: sum(getattr(one, name) for one in results) for name in _COUNTS}
    report = {
        "environment": environment,
        "gpus_of_a_test": gpus,
        "shard": "{}/{}".format(*shard),
        "wall_seconds": wall,
        **totals,
        "ended_otherwise": sum(bool(one.ended) for one in results),
        "files": [asdict(one) for one in sorted(results, key=lambda one: one.file)],
    }
    write_json(folder / "summary.json", report)
    known = {**known_seconds(gpus), **seconds_by_file(results)}
    write_json(folder / "seconds.json", {str(gpus): dict(sorted(known.items()))})


def _summary(folder: Path, wall: float, results: Sequence[FileResult]) -> list[str]:
    """What is printed at the end: what ran nothing, what failed with its output, the counts."""
    lines: list[str] = []
    nothing = [one for one in results if one.ran_nothing]
    if nothing:
        lines += ["", "all tests skipped:"]
        for one in nothing:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in one.skips.items())
            lines.append(f"  {one.file}: {reasons}")
    bad = [one for one in results if one.is_bad]
    for log in dict.fromkeys(one.log for one in bad if one.log):
        lines += ["", f"--- the end of {log}", *_tail(folder / log)]
    if bad:
        lines += ["", "failed:"]
        for one in bad:
            lines += [f"  {test}: {reason}" for test, reason in one.failures.items()]
            if one.ended:
                lines.append(f"  {one.file}: {one.ended} ({one.log})")
    counts = ", ".join(f"{sum(getattr(one, name) for one in results)} {name}" for name in _COUNTS)
    return [*lines, "", f"{counts} in {len(results)} files, {wall:.0f} s"]


def _tail(log: Path) -> list[str]:
    """The last lines before torchrun's own report, which is long and says nothing of tests."""
    text = log.read_text(errors="replace")
    text = re.split(r"^E\d{4} .*failed \(exitcode", text, maxsplit=1, flags=re.MULTILINE)[0]
    return text.splitlines()[-_LINES_OF_A_LOG:]


if __name__ == "__main__":
    leave(main())
