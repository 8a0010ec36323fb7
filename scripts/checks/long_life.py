#!/usr/bin/env python3
"""Long life: a day of mixed traffic in fast forward, on engines in parity mode.

    $ python scripts/checks/long_life.py --requests 5000
    $ python scripts/checks/long_life.py --requests 200000 --processes 8 --seconds 540

Requests are drawn from a pool: prompts of any length, shared beginnings, conversations, greedy and
sampled, with penalties, biases, stop strings, several outputs, log-probabilities, grammars, and
LoRA adapters of which there are more than slots. Each is answered alone first, by an engine without
prefix cache. Then they come in bursts to one whose cache is too small, so that requests are paused
and evicted and cached blocks released, and a share of them is aborted: waiting, in the prompt, or
while they are decoded. Every answer, and what an aborted one had, must be the one alone, to the bit
of its log-probabilities.

After each --every requests all have to end. Then every block must be free or cached, and memory,
objects, file descriptors, threads and entries of every container are counted, which must not grow
with the requests. A fault is printed with the command that repeats it. The exit code is 1 if there
is one.

The model is a toy of DeepSeek-V3's shape. It uses the models of the tests, so it runs in a checkout
only. Processes share the GPUs, each with an engine and a traffic of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.report import write_json
from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import Failure, leave, run_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from checks.life.engine import Engines
    from checks.life.requests import Entry

_PACKAGES = ("torch", "triton", "megatron-core")
# Of a command that repeats what one process has found.
_REPEATED = ("model", "tokenizer", "seed", "pool", "aborted", "every", "processes")
# What the traffic is for; it was too light if one of them never happened.
_EXPECTED = ("evicted", "chunks", "mixed_steps", "prefix_blocks", "released blocks")
_EXPECTED += ("waited for an adapter's slot", "constrained", "constrained, with an adapter")
_EXPECTED += ("overlap scheduler's steps", "Megatron's steps")
_EXPECTED += ("aborted in waiting", "aborted in prefill", "aborted in decode")


def main(argv: list[str] | None = None) -> int:
    """Run traffic; returns the exit code."""
    return run_script("long_life.py", lambda: _run(_arguments(argv)))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("long_life.py", __doc__)
    add = parser.add_argument
    add("--requests", type=int, default=5000, help="of all processes, or of --process, together")
    add("--seconds", type=float, default=86400, help="no request begins later")
    add("--seed", type=int, default=0, help="of requests and traffic")
    add("--model", choices=("dense", "moe"), default="dense", help="without or with experts")
    add("--tokenizer", default="bytes", help="bytes, or the folder of a tokenizer")
    add("--pool", type=int, default=1500, help="conversations, of one to four requests")
    add("--aborted", type=float, default=0.3, help="share of requests that are aborted")
    add("--every", type=int, default=500, help="requests of a process between two counts")
    add("--processes", type=int, default=1, help="that run side by side, each with its engine")
    add("--process", type=int, help="run this one of them alone, to repeat what it found")
    add("--share", type=Path, help="folder that processes of one run share; they start with it")
    add("--json", type=Path, help="file for counts, figures and faults")
    args = parser.parse_args(argv)
    for name in ("requests", "seconds", "pool", "every", "processes"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be above 0, got {getattr(args, name)}")
    if not 0 <= args.aborted <= 1:
        parser.error(f"--aborted must be from 0 to 1, got {args.aborted}")
    if args.process is not None and not 0 <= args.process < args.processes:
        parser.error(f"--process must be from 0 to {args.processes - 1}, got {args.process}")
    require_writable(files={"--json": args.json})
    return args


def _run(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    if args.share is not None:
        _one(args, args.process, args.share)
        return
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.processes > 1 and args.process is None:
            _several(args, folder, begin)
        else:
            _one(args, args.process or 0, folder)
        reports = _reports(folder)
    counts: Counter[str] = sum((Counter(one["counts"]) for one in reports), Counter())
    faults = [fault for one in reports for fault in one["faults"]]
    if not faults:
        faults = [f"none of the requests: {name}" for name in _EXPECTED if not counts[name]]
    about = {**provenance.source(), "versions": provenance.versions(_PACKAGES)}
    found = {"device": reports[0]["device"], "seconds": round(time.monotonic() - begin)}
    found |= {"requests": sum(one["requests"] for one in reports), "counts": counts}
    if args.json is not None:
        write_json(args.json, {**about, **found, "faults": faults, "processes": reports})
    print(json.dumps(found))
    if faults:
        print("", *faults, sep="\n")
        raise Failure(f"{len(faults)} faults")


def _several(args: argparse.Namespace, folder: Path, begin: float) -> None:
    """Run all processes to their ends; one that breaks off ends the others, which wait for it."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else list(map(str, range(torch.cuda.device_count())))
    running = []
    for i in range(args.processes):
        words = [*_words(args, i, args.requests), "--share", str(folder)]
        words += ["--seconds", str(args.seconds - (time.monotonic() - begin))]
        with (folder / f"log-{i}").open("w") as log:
            running.append(
                subprocess.Popen(
                    [sys.executable, __file__, *words],
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "TORCHINDUCTOR_COMPILE_THREADS": "1",
                        **({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}),
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=ends_with_this_process(),
                )
            )
    shown, faults = begin, set()
    while None in (codes := [one.poll() for one in running]) and not any(codes):
        time.sleep(0.2)
        if time.monotonic() > shown + 10:
            shown, reports = time.monotonic(), _reports(folder)
            _say(reports, shown - begin)
            # At once: a run that is cut off from outside writes no report.
            new = {fault for one in reports for fault in one["faults"]} - faults
            print(*new, sep="\n", end="\n" if new else "", flush=True)
            faults |= new
    for i, one in enumerate(running):
        one.kill()
        if one.wait() and codes[i]:
            print((folder / f"log-{i}").read_text(errors="replace")[-4000:])
            raise Failure(f"process {i} has ended with {codes[i]}")


def _words(args: argparse.Namespace, process: int, requests: int) -> list[str]:
    """Options of one process, with the requests of all of them."""
    given = {name: getattr(args, name) for name in _REPEATED}
    given |= {"process": process, "requests": requests}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _reports(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]


def _say(reports: list[dict], seconds: float) -> None:
    requests = sum(one["requests"] for one in reports)
    faults = sum(len(one["faults"]) for one in reports)
    print(f"{seconds:.0f} s: {requests} requests, {faults} faults", flush=True)


def _write(path: Path, content: bytes) -> None:
    """Write a file that others find whole, or not at all."""
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)


def _one(args: argparse.Namespace, index: int, folder: Path) -> None:
    """The requests of one process; leaves its report in the folder."""
    begin = time.monotonic()
    import torch

    from absorbed_mla.serving.structured_output.grammar import require_library
    from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
    from checks.life.census import growth
    from checks.life.engine import Engines
    from checks.life.traffic import Fault, Traffic

    require_library()
    torch.set_num_threads(1)
    if on_gpu := torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(0.9 / args.processes)
    engines = Engines(folder, args.model, open_tokenizer(args.tokenizer, None), index)
    pool = _pool(args, folder, engines)
    llm = engines.mixed()
    traffic = Traffic(llm, pool, f"{args.seed}/{index}", args.aborted)

    def save() -> None:
        report = traffic.report()
        report["device"] = torch.cuda.get_device_name() if on_gpu else provenance.processor()
        command = " ".join(_words(args, index, traffic.planned))
        repeat = f"  python scripts/checks/long_life.py {command}"
        report["faults"] = [f"{fault}\n{repeat}" for fault in report["faults"]]
        _write(folder / f"report-{index}.json", json.dumps(report).encode())
        if args.share is None:
            _say([report], time.monotonic() - begin)

    try:
        traffic.run(_sizes(args, folder), begin + args.seconds, save)
    except Fault as fault:
        traffic.faults.append(str(fault))
    traffic.faults += growth(traffic.ended, traffic.figures)
    save()
    if not traffic.faults:
        llm.close()


def _sizes(args: argparse.Namespace, folder: Path) -> Iterator[int]:
    """Numbers of requests that a process takes, one after the other, of those left for all."""
    while True:
        with (folder / "taken").open("ab", buffering=0) as file:
            file.write(b".")
            left = args.requests - args.every * (file.tell() - 1)
        if left <= 0:
            return
        yield min(args.every, left)


def _pool(args: argparse.Namespace, folder: Path, engines: Engines) -> list[Entry]:
    """Requests of all conversations, each answered alone by one of the processes."""
    from checks.life.requests import answered

    llm, adapters = engines.alone(), engines.adapters
    shares = args.processes if args.share is not None else 1
    for share in range(shares) if shares == 1 else [args.process]:
        names = [f"{args.seed}/{i}" for i in range(share, args.pool, shares)]
        own = [answered(llm, name, adapters) for name in names]
        _write(folder / f"pool-{share}", pickle.dumps(own))
    llm.close()
    files = [folder / f"pool-{share}" for share in range(shares)]
    while not all(file.exists() for file in files):
        time.sleep(0.2)
    each = [pickle.loads(file.read_bytes()) for file in files]
    entries = [entry for i in range(args.pool) for entry in each[i % shares][i // shares]]
    # Equal files of each process's own: there would be as many adapters as processes have together.
    own = {adapter.lora_int_id: adapter for adapter in adapters}
    return [
        dataclasses.replace(one, adapter=own[one.adapter.lora_int_id] if one.adapter else None)
        for one in entries
    ]


if __name__ == "__main__":
    leave(main())
