"""The command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from absorbed_mla.options import FORMS as FORM_OPTIONS
from attention_benchmark.cases import FORMS, LAYOUTS, CoreCase, LayerCase
from context_parallel_benchmark.arguments import (
    DIMS,
    add_dims,
    check_files,
    list_of,
    new_parser,
    one_of,
    parse_sizes,
    seconds,
)

SUITES = ("layer", "core", "all")
LAYER_TOKENS = "4k,8k,16k,32k,64k"
CORE_TOKENS = "8k,32k"
QUICK_TOKENS = "4k,8k"
SECONDS_PER_ROW, QUICK_SECONDS_PER_ROW = 0.5, 0.1
# Implementation and recomputation. Like is compared with like, as ours is meant first.
_RECOMPUTED = (("megatron", True), ("ours", True))
_KEPT = (("megatron", False), ("ours", False))
_SECONDS_HELP = f"of repetitions (default: {SECONDS_PER_ROW}, quick {QUICK_SECONDS_PER_ROW})"


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        argv: Without the program's name.
        description: What ``--help`` begins with.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_attention.py", description)
    add = parser.add_argument
    add("folder", type=Path, help="where attention.json, .md and .png go")
    add("--render", type=Path, nargs="+", metavar="FILE.json", help="measure nothing, render these")
    add("--suite", choices=SUITES, default="all", help="what is measured")
    add("--only", metavar="TEXT", help="of suite core, what has this in its name, as hopper")
    add("--device", choices=("cuda", "cpu"), help="where it runs (default: a GPU if there is one)")
    add("--quick", action="store_true", help=f"short: {QUICK_TOKENS} tokens, unless given")
    add("--heads", type=parse_sizes, default="128,16", help="of the layer or attention")
    add(
        "--seq-lens",
        type=parse_sizes,
        help="of a sequence or pack, k is 1024 "
        f"(default: {LAYER_TOKENS} for layers, {CORE_TOKENS} for attention alone)",
    )
    add("--layouts", type=list_of(one_of(LAYOUTS)), default="sbhd,thd", help="thd: packs")
    add("--form", choices=FORM_OPTIONS, default="auto", help="how our layer is executed")
    add(
        "--backend",
        choices=CORE_ATTENTION_BACKENDS,
        default="auto",
        help="core_attention_backend of our layer",
    )
    add("--rope-type", choices=("rope", "yarn"), default="rope", help="rotary embedding")
    add("--rope-fusion", action="store_true", help="of Megatron's layers; only with yarn")
    add("--seconds-per-row", type=seconds, help=_SECONDS_HELP)
    add(
        "--longest-step",
        type=seconds,
        default=5.0,
        help="rows whose step will take more seconds, by the next smaller one's, are left out",
    )
    add(
        "--time-limit",
        type=seconds,
        default=240.0,
        help="s after the start from which rows are left out",
    )
    add("--seed", type=int, default=1234, help="of weights, inputs and packs")
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.rope_fusion and args.rope_type != "yarn":
        parser.error("--rope-fusion needs --rope-type yarn: Megatron fuses no other in MLA")
    if args.quick and args.seq_lens is None:
        args.seq_lens = parse_sizes(QUICK_TOKENS)
    if args.seconds_per_row is None:
        args.seconds_per_row = QUICK_SECONDS_PER_ROW if args.quick else SECONDS_PER_ROW
    check_files(args.folder, args.render or ())
    return args


def layer_cases(args: argparse.Namespace) -> list[LayerCase]:
    """Recomputed layers before the others, each with smaller ones first.

    So what is too large for the machine, or too late, is what matters least.
    """
    if args.suite == "core":
        return []
    return [
        LayerCase(implementation, recompute, heads, tokens, layout)
        for ways in (_RECOMPUTED, _KEPT)
        for tokens in sorted(args.seq_lens or parse_sizes(LAYER_TOKENS))
        for heads in sorted(args.heads)
        for layout in args.layouts
        for implementation, recompute in ways
    ]


def core_cases(args: argparse.Namespace, implementations: Sequence[str]) -> list[CoreCase]:
    """Smaller ones first."""
    if args.suite == "layer":
        return []
    return [
        CoreCase(implementation, form, heads, tokens)
        for tokens in sorted(args.seq_lens or parse_sizes(CORE_TOKENS))
        for heads in sorted(args.heads)
        for form in FORMS
        for implementation in implementations
        if (args.only or "") in implementation
    ]


def require_device(args: argparse.Namespace, available: bool) -> str:
    """``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: If a GPU is asked for and there is none.
    """
    if args.device == "cuda" and not available:
        raise ValueError("--device cuda needs a GPU, and there is none; give --device cpu")
    return args.device or ("cuda" if available else "cpu")


def command_line() -> list[str]:
    """As the script was called."""
    return ["python", *sys.argv]
