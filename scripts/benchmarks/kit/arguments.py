"""Command lines of benchmarks: the options that all of them have, and the types of options."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from console.outputs import require_writable
from console.parser import Parser

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


def add_folder(parser: Parser, files: str, several: bool = True) -> None:
    """The positional ``folder`` of the results, and ``--render``.

    Args:
        parser: Of the benchmark.
        files: Names of what is written there.
        several: Whether ``--render`` takes more than one file.
    """
    parser.add_argument("folder", type=Path, help=f"where {files} go")
    add_render(parser, several)


def add_render(parser: Parser, several: bool = True) -> None:
    """``--render``: show former results instead of measuring."""
    text = "measure nothing, show the results in " + ("these files" if several else "this file")
    parser.add_argument(
        "--render", type=Path, nargs="+" if several else 1, metavar="FILE.json", help=text
    )


def add_only(parser: Parser) -> None:
    """``--only``: measure some of the cases."""
    parser.add_argument("--only", metavar="TEXT", help="measure only cases with this in their name")


def add_device(parser: Parser) -> None:
    """``--device``."""
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="where it runs (default: a GPU if there is one)"
    )


def add_seed(parser: Parser, of: str) -> None:
    """``--seed``."""
    parser.add_argument("--seed", type=int, default=1234, help=f"of {of}")


def add_dims(parser: argparse.ArgumentParser, dims: dict[str, int]) -> None:
    """An option for every dimension of the layer."""
    for name, size in dims.items():
        parser.add_argument(f"--{name}", type=count, default=size, help=_MEANING[name])


def dims_of(args: argparse.Namespace) -> dict[str, int]:
    """The layer's dimensions, by the names of ``DIMS``."""
    return {name: getattr(args, name.replace("-", "_")) for name in DIMS}


def check_files(folder: Path | None, render: Iterable[Path] | None) -> None:
    """Check that the folder can be written and that the files to render exist.

    Raises:
        ValueError: Naming the option and the path.
    """
    for file in render or ():
        if not file.is_file():
            raise ValueError(f"--render must be JSON that this script wrote; got {file}")
    if folder is not None:
        require_writable(folders={"folder": folder})


def chosen(cases: Iterable[Any], only: str | None) -> list:
    """The cases that ``--only`` leaves."""
    return [case for case in cases if (only or "") in str(case)]


def use_device(device: str | None) -> str:
    """``"cuda"`` or ``"cpu"``, as ``--device`` says; must be called before PyTorch looks for a GPU.

    Args:
        device: The value of ``--device``; None takes a GPU if there is one.

    Raises:
        ValueError: If a GPU is asked for and there is none.
    """
    if device == "cpu":
        # Megatron asks PyTorch for the device in many places.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Only here, so that --help needs no torch.
    import torch

    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ValueError("--device cuda needs a GPU, and there is none; give --device cpu")
    return device or ("cuda" if available else "cpu")


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


def parse_sizes(text: str) -> list[int]:
    """Whole numbers of ``"16k,1m,1000"``; k and m are 1024 and 1024^2."""
    return list_of(_size)(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(
            f"expected a whole number above 0, with or without k or m, got {text!r}"
        )
    return int(match[1]) * _UNITS[match[2]]


def one_of(accepted: tuple[str, ...]) -> Callable[[str], str]:
    """A parser of one of these words, for :func:`list_of`."""

    def parse(text: str) -> str:
        if text.strip() not in accepted:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(accepted)}, separated by commas; got {text!r}"
            )
        return text.strip()

    return parse


def list_of(parse: Callable[[str], Any], separator: str = ",") -> Callable[[str], list]:
    """A parser of several values of ``parse``; what is named twice is measured once."""

    def parse_all(text: str) -> list:
        return list(dict.fromkeys(parse(part) for part in text.split(separator)))

    return parse_all
