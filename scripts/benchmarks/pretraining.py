#!/usr/bin/env python3
"""Pretrain one small model through Megatron's own loop, with its MLA and with ours.

    $ python scripts/bench_pretraining.py docs/pretraining
    $ python scripts/bench_pretraining.py /tmp/quick --iterations 20 --layers 2 --skip 5
    $ python scripts/bench_pretraining.py docs/pretraining --render old/pretraining.json

Each run is scripts/pretraining_benchmark/pretrain_gpt.py in processes of its own, which calls
megatron.training.pretrain with mock data; all begin with the same weights. The model's MLA has
DeepSeek-V3's dimensions and 16 heads. GPUs compute in bfloat16 with TransformerEngine's layers; a
CPU computes in float32 with Megatron's local ones, which is for tests. What is compared: the losses
of every iteration, tokens per second and MFU. The logs of the runs stay in the folder. The exit
code is 1 if a run failed; the last line of the output is JSON.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

import provenance  # noqa: E402
from benchmark_report import publish  # noqa: E402
from console.script import leave, run_script  # noqa: E402
from context_parallel_benchmark.arguments import dims_of  # noqa: E402
from pretraining_benchmark.arguments import parse_arguments  # noqa: E402
from pretraining_benchmark.report import (  # noqa: E402
    NAME,
    Report,
    differences_text,
    errors,
    markdown,
    plot,
    summary,
    table,
)
from pretraining_benchmark.runs import train  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare, or render what was measured; returns the exit code."""
    return run_script("bench_pretraining.py", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = parse_arguments(argv, __doc__)
    if not args.render:
        return compare(args)
    render(args.folder, Report.read(args.render))
    return 0


def compare(args) -> int:
    """Train with every attention, write everything, and return the exit code.

    Raises:
        ValueError: If there is a GPU but not what Megatron's own MLA needs there.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu and find_spec("transformer_engine") is None:
        raise ValueError(
            "Megatron's standard MLA on a GPU needs transformer-engine, not installed here"
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    attentions = [(name, name) for name in args.attentions]
    if args.noise:
        attentions.insert(0, (f"{args.attentions[0]} again", args.attentions[0]))
    report = Report(describe(args, on_gpu), [])
    with tempfile.TemporaryDirectory() as scratch:
        for name, attention in attentions:
            print(f"training with {name} MLA ...", flush=True)
            run = train(name, attention, Path(scratch) / "first_weights.pt", args, on_gpu)
            report.runs.append(run)
            report.write(args.folder / f"{NAME}.json")
    render(args.folder, report)
    return 1 if any(run.error for run in report.runs) else 0


def describe(args, on_gpu: bool) -> dict:
    """Machine, versions, date, command line, and what the runs have in common."""
    import torch

    sizes = {"layers": args.layers, "heads": args.heads, "ffn-hidden-size": args.ffn_hidden_size}
    sizes |= dims_of(args)
    sizes |= {"vocabulary": args.vocab_size, "sequence": args.seq_length}
    return {
        "date": provenance.today(),
        "command": shlex.join(["python", *sys.argv]),
        "commit": provenance.commit(),
        "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
        "gpus": args.gpus if on_gpu else 0,
        "dtype": "bfloat16" if on_gpu else "float32",
        "peak_tflops": args.peak_tflops if on_gpu else None,
        "tokens_per_iteration": args.global_batch_size * args.seq_length,
        "model": sizes,
        "megatron": args.megatron,
        "versions": provenance.attention_versions(on_gpu),
    }


def render(folder: Path, report: Report) -> None:
    """Write the table and the plot, and print the table and a last line of JSON."""
    parts = (table(report), differences_text(report), errors(report))
    draw = partial(plot, report)
    publish(folder, NAME, markdown(report), draw, parts, summary(report))


if __name__ == "__main__":
    leave(main())
