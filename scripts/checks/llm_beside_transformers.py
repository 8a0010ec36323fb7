#!/usr/bin/env python3
"""``LLM`` beside transformers, model by model: log-probabilities of every position.

    $ python scripts/checks/llm_beside_transformers.py --json docs/measurements/accuracy/llm.json
    $ python scripts/checks/llm_beside_transformers.py --only dense           # without a GPU, too

Small models with the routing of DeepSeek-V2, V2-Lite, V3 and V3.2, and with odd numbers of experts
and groups, are made by transformers. LLM writes greedily in bf16, with and without
TransformerEngine, CUDA graphs and the prefix cache, alone and in a batch, and in fp32. Each text is
read by transformers in fp32, which gives the errors of LLM's log-probabilities, and in bf16, whose
errors say what rounding costs: LLM's may be at most twice as large (four times the largest and the
mean square where there are experts, because rounding may choose another one). Positions of prompts
are compared where prompts are read without graphs and cached blocks.

Every case runs in a process of its own, several at a time. It uses the models of the tests, so it
runs in a checkout only. The exit code is 1 if a case fails or an error is too large.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.report import write_json
from checks.beside_transformers.cases import MODELS, WAYS, Case, cases_of
from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import Failure, leave, run_script

_PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "transformers")
_LINES = 15


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all cases, or one; returns the exit code."""
    return run_script("llm_beside_transformers.py", lambda: _run(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("llm_beside_transformers.py", __doc__)
    add = parser.add_argument
    add("--json", type=Path, help="where the results go")
    add(
        "--only",
        default=".",
        help="regular expression: models whose name has a match (default: all)",
    )
    add("--jobs", type=int, help="cases at the same time (default: cores - 2)")
    add("--seconds", type=float, default=150, help="a case that takes longer is killed")
    add(
        "--case",
        help="measure this case in this process, MODEL/DTYPE[/transformer_engine][/graphs]",
    )
    add("--model", type=Path, help="with --case: folder of its model (default: made anew)")
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.model and not args.case:
        parser.error("--model needs --case")
    args.case = Case.of_name(args.case) if args.case else None
    args.names = [name for name in MODELS if re.search(args.only, name)]
    if not args.names:
        parser.error(f"--only must match one of {'; '.join(MODELS)}, got {args.only!r}")
    if args.json:
        require_writable(files={"--json": args.json})
    return args


def _run(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    if args.case:
        _run_case(args)
        return
    import torch

    on_gpu = torch.cuda.is_available()
    about = {
        **provenance.source(),
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "versions": provenance.versions(_PACKAGES),
    }
    with_engine = importlib.util.find_spec("transformer_engine") is not None
    rows, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for case, found in _results(args, Path(folder), on_gpu, with_engine):
            if isinstance(found, str):
                failed.append(f"{case.name}: {found}")
                print(f"{case.name} failed", flush=True)
                continue
            rows += found
            for row in found:
                print(_line(row), flush=True)
    if args.json:
        write_json(args.json, {"environment": about, "rows": rows})
    failed += [f"{_line(row)}: {row['exceeded']}" for row in rows if row["exceeded"]]
    if failed:
        raise Failure("\n".join([f"{len(failed)} cases or rows:", *failed]))
    print(f"{len(rows)} rows, all within bf16's own error")


def _run_case(args: argparse.Namespace) -> None:
    from checks.beside_transformers.measure import measure, prepare

    prepare(args.case)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or MODELS[args.case.model].write(Path(folder) / "model")
        rows = measure(args.case, model)
    if args.json:
        write_json(args.json, rows)
    for row in rows:
        print(_line(row))


def _results(args: argparse.Namespace, folder: Path, on_gpu: bool, with_engine: bool):
    """Cases with their rows, or with the end of what a process that failed has printed."""
    jobs = args.jobs or max(1, (os.cpu_count() or 1) - 2)
    waiting: list[tuple[Case, Future]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for number, name in enumerate(args.names):
            model = MODELS[name].write(folder / f"model{number}")
            for case in cases_of(name, gpu=on_gpu, transformer_engine=with_engine):
                report = folder / f"{number}-{len(waiting)}.json"
                waiting.append(
                    (case, pool.submit(_in_a_process, case, model, report, args.seconds))
                )
        for case, future in waiting:
            yield case, future.result()


def _in_a_process(case: Case, model: Path, report: Path, seconds: float) -> list[dict] | str:
    words = ["--case", case.name, "--model", str(model), "--json", str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=ends_with_this_process(),
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()[0] + f"\nkilled after {seconds:.0f} s"
    if process.returncode:
        return "\n".join(said.strip().splitlines()[-_LINES:])
    return json.loads(report.read_text())


def _line(row: dict) -> str:
    case = Case(*(row[name] for name in ("model", "dtype", *WAYS)))
    ways = "in a batch" if row["together"] else "alone"
    figures = " ".join(f"{name} {row[name]:.2e}" for name in ("worst", "rms", "median"))
    theirs = " ".join(
        f"{row['transformers_bf16'][name]:.2e}" for name in ("worst", "rms", "median")
    )
    return f"{case.name}, {ways}: {figures} (transformers in bf16 {theirs}), same tokens " + (
        f"{row['same_choice']:.3f}"
    )


if __name__ == "__main__":
    leave(main())
