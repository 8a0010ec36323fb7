"""The command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from absorbed_mla.options import CP_COMM_TYPES, FORMS
from console.outputs import require_writable
from console.parser import Parser

LAYOUTS = ("sbhd", "thd")
IMPLEMENTATIONS = ("ours", "megatron")
RECOMPUTE = ("none", "mla_up_proj")
# What TransformerEngine 2.12 accepts for multi-head latent attention.
MEGATRON_COMM_TYPE = "p2p"
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
# DeepSeek-V3's.
DIMS = {
    "hidden-size": 7168,
    "q-lora-rank": 1536,
    "kv-lora-rank": 512,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
}


_MEANING = {
    "hidden-size": "width of the model",
    "q-lora-rank": "width of the compressed query",
    "kv-lora-rank": "width of the latent",
    "qk-head-dim": "of a head's query and key, without RoPE",
    "qk-pos-emb-head-dim": "of a head's query and key, with RoPE",
    "v-head-dim": "of a head's value",
}


@dataclass(frozen=True)
class Case:
    """One layer and one input that is measured.

    Attributes:
        implementation: ``"ours"`` or ``"megatron"``.
        cp_comm_type: As in Megatron's config.
        form: Of ours; ``"expanded"`` for Megatron's own, which knows no other.
        tokens: Of the whole sequence or pack.
        heads: Of the layer.
        layout: ``"sbhd"``, or ``"thd"``: a pack of equal documents.
        documents: In the pack; 1 for ``sbhd``.
        recompute: Module that is recomputed in backward, or ``"none"``.
    """

    implementation: str
    cp_comm_type: str
    form: str
    tokens: int
    heads: int
    layout: str
    documents: int
    recompute: str

    def __str__(self) -> str:
        recompute = "" if self.recompute == "none" else f" recompute {self.recompute}"
        return (
            f"{self.implementation} {self.cp_comm_type} {self.form}{recompute} {self.layout} "
            f"S={self.tokens} n={self.heads}"
        )


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        argv: Without the program's name.
        description: What ``--help`` begins with.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_context_parallel.py", description)
    add = parser.add_argument
    add("folder", type=Path, help="where context_parallel.json, .md and .png go")
    add("--render", type=Path, nargs="+", metavar="FILE.json", help="measure nothing, render these")
    add(
        "--sizes", type=parse_sizes, default="16k,32k,64k,128k", help="tokens of a sequence or pack"
    )
    add("--heads", type=list_of(count), default="16,128", help="of the layer")
    add("--layouts", type=list_of(one_of(LAYOUTS)), default="sbhd", help="thd: packs")
    add("--documents", type=count, default=4, help="equal ones in a thd pack")
    add(
        "--implementations",
        type=list_of(one_of(IMPLEMENTATIONS)),
        default="ours,megatron",
        help="whose layers",
    )
    add(
        "--cp-comm-types",
        type=list_of(one_of(CP_COMM_TYPES)),
        default="all_gather,p2p",
        help="how ranks exchange latents in ours",
    )
    add("--form", choices=FORMS, default="expanded", help="how ours is executed")
    add(
        "--recompute",
        type=list_of(one_of(RECOMPUTE)),
        default="none",
        help="in both layers, none or mla_up_proj, or both for rows of each",
    )
    add("--rope-type", choices=("rope", "yarn"), default="rope", help="rotary embedding")
    add("--warmup", type=count, default=1, help="steps that are not timed")
    add("--seconds-per-row", type=seconds, default=5.0, help="for timed steps")
    add("--timeout", type=seconds, default=120.0, help="of a collective, in s")
    add("--profile", action="store_true", help="measure the overlap of communication (ours, GPU)")
    add("--seed", type=int, default=1234, help="of weights and inputs")
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    check_files(args.folder, args.render or ())
    return args


def new_parser(script: str, description: str) -> argparse.ArgumentParser:
    """A parser that prints ``description`` as it is."""
    return Parser(script, description)


def add_dims(parser: argparse.ArgumentParser, dims: dict[str, int]) -> None:
    """An option for every dimension of the layer."""
    for name, size in dims.items():
        parser.add_argument(f"--{name}", type=count, default=size, help=_MEANING[name])


def check_files(folder: Path | None, to_render: Iterable[Path]) -> None:
    """Check that a report can be written, and that what it is made of is there.

    Raises:
        ValueError: Naming what is not so.
    """
    for file in to_render:
        if not file.is_file():
            raise ValueError(f"--render must be JSON that this script wrote; got {file}")
    if folder is not None:
        require_writable(folders={"folder": folder})


def dims_of(args: argparse.Namespace) -> dict[str, int]:
    """The layer's dimensions, by the names of ``DIMS``."""
    return {name: getattr(args, name.replace("-", "_")) for name in DIMS}


def cases(args: argparse.Namespace, cp_size: int) -> list[Case]:
    """All cases, smaller ones first: what is too large for the machine comes last.

    Raises:
        ValueError: If there is nothing to cut a sequence over, or one does not divide.
    """
    if cp_size < 2:
        raise ValueError(
            "context parallelism needs 2 or more processes, got 1; start this script by "
            "torchrun --nproc-per-node 2"
        )
    ways = list(_ways(args))
    result: list[Case] = []
    for tokens in sorted(args.sizes):
        for heads in args.heads:
            for layout in args.layouts:
                documents = args.documents if layout == "thd" else 1
                _require_divisible(tokens, documents, cp_size)
                inputs = (tokens, heads, layout, documents)
                result += [Case(*way, *inputs, again) for again in args.recompute for way in ways]
    return result


def parse_sizes(text: str) -> list[int]:
    """Tokens of ``"16k,1m,1000"``; k and m are 1024 and 1024^2."""
    return list_of(_tokens)(text)


def _ways(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Implementation, cp_comm_type and form."""
    if "ours" in args.implementations:
        yield from (("ours", comm_type, args.form) for comm_type in args.cp_comm_types)
    if "megatron" in args.implementations:
        yield "megatron", MEGATRON_COMM_TYPE, "expanded"


def _require_divisible(tokens: int, documents: int, cp_size: int) -> None:
    pieces = documents * 2 * cp_size
    if tokens % pieces:
        raise ValueError(
            f"--sizes: {tokens} tokens do not divide into {documents} document(s) of "
            f"2 x {cp_size} chunks; give multiples of {pieces}"
        )


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"expected a whole number above 0, with or without k or m, got {text!r}"
        )
    return int(match[1]) * _UNITS[match[2]]


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    # Not "value <= 0", which NaN passes.
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def one_of(accepted: tuple[str, ...]):
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text.strip() not in accepted:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(accepted)}, separated by commas; got {text!r}"
            )
        return text.strip()

    return parse


def list_of(parse):
    """A parser of what ``parse`` takes, separated by commas, none twice."""

    def parse_all(text: str) -> list:
        # Named twice is measured once.
        return list(dict.fromkeys(parse(part) for part in text.split(",")))

    return parse_all
