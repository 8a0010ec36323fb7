#!/usr/bin/env python3
"""Write a Hugging Face checkpoint of random values with a released model's names and shapes.

    $ python scripts/benchmarks/make_synthetic_checkpoint.py OUT --layers 4 --experts 8
    $ python scripts/benchmarks/make_synthetic_checkpoint.py OUT --size 20GB --fp8

Every tensor has the name and the shape that it has in the released model; only the numbers of
layers and experts are smaller (and the widths, with --scale-down). No two tensors of one shape are
equal, but for the copies that a multi-token-prediction layer holds of embedding and output layer.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.synthetic_checkpoint.models import MODELS, Choice, model_config, stored_tensors
from benchmarks.synthetic_checkpoint.sizes import fit_size, parse_size, total_bytes
from console.parser import Parser
from console.script import leave, run_script

# Left free on the disk, for the index, headers and the file system's own.
MARGIN = 64 * 10**6


def main(argv: list[str] | None = None) -> int:
    """Parse the options, check that everything fits, write; returns the exit code."""
    return run_script("make_synthetic_checkpoint.py", lambda: _make(_parser().parse_args(argv)))


def _make(arguments: argparse.Namespace) -> None:
    choice = _choice(arguments)
    config = model_config(choice)
    nbytes = total_bytes(config)
    _check_target(arguments.folder, nbytes)
    print(
        f"{arguments.folder}: {choice.model}, {choice.layers} layers, the first "
        f"{choice.dense_layers} dense, {choice.experts} experts, widths / {choice.scale_down}, "
        f"{nbytes / 1e9:.2f} GB",
        flush=True,
    )
    _write(arguments, config)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("make_synthetic_checkpoint.py", __doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="OUT", help="the new folder; must not exist")
    add("--model", choices=MODELS, default="deepseek-v3", help="whose names and shapes")
    add("--layers", type=int, metavar="N", help="decoder layers (default: 2)")
    add("--experts", type=int, metavar="E", help="routed experts of a MoE layer (default: 8)")
    add("--dense-layers", type=int, default=1, metavar="N", help="first layers that are dense")
    add("--mtp", action="store_true", help="add one multi-token-prediction layer")
    size = "choose layers and experts for about this size, e.g. 20GB; smaller widths if needed"
    add("--size", type=_size, help=size)
    add("--fp8", action="store_true", help="block-scaled FP8 weights with weight_scale_inv")
    rows = "rows of the embedding (default: the model's own)"
    add("--vocab-size", type=int, metavar="N", help=rows)
    add("--scale-down", type=int, default=1, metavar="N", help="divide the model's widths by N")
    shard = "largest size of one file (default: 4GB)"
    add("--shard-size", type=_size, default=4 * 10**9, help=shard)
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _choice(arguments: argparse.Namespace) -> Choice:
    given = [f"--{name}" for name in ("layers", "experts") if getattr(arguments, name) is not None]
    if arguments.size and given:
        raise ValueError(f"--size chooses layers and experts: drop {' and '.join(given)}")
    choice = Choice(
        model=arguments.model,
        layers=2 if arguments.layers is None else arguments.layers,
        experts=8 if arguments.experts is None else arguments.experts,
        dense_layers=arguments.dense_layers,
        mtp=arguments.mtp,
        fp8=arguments.fp8,
        vocab_size=arguments.vocab_size,
        scale_down=arguments.scale_down,
    )
    return fit_size(choice, arguments.size) if arguments.size else choice


def _check_target(folder: Path, nbytes: int) -> None:
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists already; name a folder that does not")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir():
        raise ValueError(f"{folder} cannot be made: {parent} is no folder")
    free = shutil.disk_usage(parent).free
    if free < nbytes + MARGIN:
        raise ValueError(
            f"{folder} needs {nbytes / 1e9:.1f} GB, and only {free / 1e9:.1f} GB are free there"
        )


def _write(arguments: argparse.Namespace, config: dict) -> None:
    # torch takes seconds to import, and --help and errors do without.
    from benchmarks.synthetic_checkpoint.values import Values, shards, write_checkpoint

    tensors = list(stored_tensors(config))
    values = Values(tensors)
    arguments.folder.mkdir(parents=True)
    try:
        write_checkpoint(
            arguments.folder,
            config,
            shards(tensors, arguments.shard_size),
            values,
            lambda file: print(f"  {file}", flush=True),
        )
    except BaseException:
        # A folder without index and config.json would only be in the way.
        shutil.rmtree(arguments.folder)
        raise


if __name__ == "__main__":
    leave(main())
