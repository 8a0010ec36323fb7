"""The command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from console.outputs import require_writable
from context_parallel_benchmark.arguments import (
    DIMS,
    add_dims,
    check_files,
    new_parser,
    one_of,
    parse_sizes,
    seconds,
)
from decode_benchmark.cases import IMPLEMENTATIONS, DecodeCase

_FAST = tuple(name for name in IMPLEMENTATIONS if name != "ours, reference")
_WIDTHS = ("kv-lora-rank", "qk-pos-emb-head-dim")
_DEFAULTS = {"batches": "1,8,32,64,128", "kv": "1k,4k,8k,32k", "block_sizes": "64,16"}
_QUICK_TEXT = "batches of 1, 32 and 128, 8k keys, blocks of 64, unless given"
_QUICK = {"batches": "1,32,128", "kv": "8k", "block_sizes": "64"}


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        argv: Without the program's name.
        description: What ``--help`` begins with.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_decode.py", description)
    add = parser.add_argument
    add("--render", type=Path, metavar="FILE.json", help="measure nothing, show what this has")
    add("--json", type=Path, metavar="FILE", help="where the report goes, written after each case")
    add("--plot", type=Path, metavar="FILE", help="a PNG of rates over the batch")
    add("--device", choices=("cuda", "cpu"), help="where it runs (default: a GPU if there is one)")
    add("--quick", action="store_true", help=_QUICK_TEXT)
    add("--heads", type=parse_sizes, default="128,16", help="query heads")
    add("--batches", type=parse_sizes, help=f"requests (default: {_DEFAULTS['batches']})")
    add("--kv", type=parse_sizes, help=f"keys of each, k is 1024 (default: {_DEFAULTS['kv']})")
    add("--uneven", action="store_true", help="requests of any number of keys up to --kv, too")
    add("--query-lengths", type=parse_sizes, default="1,2", help="new tokens of a request")
    add(
        "--block-sizes",
        type=parse_sizes,
        help=f"of the cache (default: {_DEFAULTS['block_sizes']})",
    )
    add(
        "--implementations",
        type=_implementations,
        help=f"whose, separated by ; (default: on a GPU {'; '.join(_FAST)}; else all)",
    )
    add("--no-graph", action="store_true", help="launch calls from the host")
    add("--seconds-per-row", type=seconds, default=0.1, help="of repetitions")
    add(
        "--time-limit",
        type=seconds,
        default=400.0,
        help="s after the start from which rows are left out",
    )
    add("--seed", type=int, default=1234, help="of the inputs")
    add_dims(parser, {name: DIMS[name] for name in _WIDTHS})
    args = parser.parse_args(argv)
    for name, text in (_QUICK if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, parse_sizes(text))
    check_files(None, [args.render] if args.render else [])
    if max(args.query_lengths) > min(args.kv):
        parser.error(
            f"--query-lengths must be at most the keys of --kv: {max(args.query_lengths)} new "
            f"tokens are more than {min(args.kv)}"
        )
    require_writable(files={"--json": args.json, "--plot": args.plot})
    return args


def _implementations(text: str) -> list[str]:
    """Names, which have commas, separated by semicolons; none twice."""
    return list(dict.fromkeys(one_of(IMPLEMENTATIONS)(part) for part in text.split(";")))


def cases(args: argparse.Namespace, device: str) -> list[DecodeCase]:
    """Implementations beside each other, smaller inputs first, other block sizes last."""
    implementations = args.implementations or (_FAST if device == "cuda" else IMPLEMENTATIONS)
    inputs = product(
        (False, True) if args.uneven else (False,),
        args.block_sizes,
        sorted(args.query_lengths),
        sorted(args.kv),
        sorted(args.batches),
        sorted(args.heads),
    )
    return [
        DecodeCase(implementation, heads, batch, kv, new, block, uneven)
        for uneven, block, new, kv, batch, heads in inputs
        for implementation in implementations
    ]
