"""Command line of sparse_finetune.py."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path

from console.outputs import require_writable
from console.parser import Parser
from console.script import run_script
from sparse.stages import SIZES

SCRIPT = "sparse_finetune.py"
_DESCRIPTION = """\
Train a small dense model, give it an indexer, warm that up, train with sparse attention, and
compare with the model that stays dense: recall of the top-k and loss on held-out text."""


def main(argv: list[str]) -> int:
    """Run the script; returns ``run_script``'s exit code."""
    return run_script(SCRIPT, lambda: _run(_parse(argv)))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(SCRIPT, _DESCRIPTION)
    add = parser.add_argument
    add("--output", metavar="FOLDER", help="folder for checkpoints, metrics, JSON and plot")
    add("--render", metavar="FILE", help="only draw the plot of a former run's JSON, beside it")
    flags = {name: f"--{name.replace('_', '-')}" for name in SIZES}
    for name, (default, text) in SIZES.items():
        add(flags[name], type=int, default=default, metavar="N", help=text)
    args = parser.parse_args(argv)
    if (args.output is None) == (args.render is None):
        raise ValueError("give --output, a folder to run in, or --render, a former run's JSON")
    for name, flag in flags.items():
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if args.topk >= args.seq_length:
        raise ValueError(
            f"--topk must be below --seq-length {args.seq_length}, or there is no choice; "
            f"got {args.topk}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: pip install matplotlib")
    require_writable(folders={"--output": args.output})
    return args


def _run(args: argparse.Namespace) -> None:
    if args.render:
        file = Path(args.render)
        result = json.loads(file.read_text())
    else:
        settings = argparse.Namespace(**{name: getattr(args, name) for name in SIZES})
        file = Path(args.output) / "recall.json"
        result = _measured(Path(args.output), settings)
        file.write_text(json.dumps(result, indent=1) + "\n")
    # Imported late, because it takes seconds.
    from sparse.plot import plot, table

    picture = file.with_suffix(".png")
    plot(result, picture)
    print(f"{table(result)}\nmeasured: {file}; plot: {picture}", flush=True)


def _measured(folder: Path, settings: argparse.Namespace) -> dict:
    # Imported late, because it takes seconds.
    from sparse.measure import measure
    from sparse.stages import run_stages

    stages = run_stages(folder, settings)
    result = measure(stages, settings)
    seconds = os.times()
    result["environment"]["cpu_seconds"] = round(seconds.user + seconds.system)
    return result
