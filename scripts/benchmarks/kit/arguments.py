"""Command lines of benchmarks: options that several of them have, and types of options."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
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
    "hidden-size": "width of the hidden states",
    "q-lora-rank": "width of the compressed query",
    "kv-lora-rank": "width of the latent, without k_rope",
    "qk-head-dim": "width of q_nope and k_nope of one head",
    "qk-pos-emb-head-dim": "width of q_rope and k_rope of one head",
    "v-head-dim": "width of the value of one head",
}


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def count_or_none(text: str) -> int:
    """The type of options that take a whole number of at least 0."""
    return 0 if text.strip() == "0" else count(text)


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
    return list_of(parse_size)(text)


def parse_size(text: str) -> int:
    """One of :func:`parse_sizes`."""
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
    """A parser of several values of ``parse``; repeated values are dropped."""

    def parse_all(text: str) -> list:
        return list(dict.fromkeys(parse(part) for part in text.split(separator)))

    return parse_all


_COMMON: dict[str, dict[str, Any]] = {
    "folder": {"type": Path, "help": "folder for the JSON file, the plot and any logs"},
    "--render": {
        "type": Path,
        "nargs": "+",
        "metavar": "FILE.json",
        "help": "measure nothing, print and plot the results in these files",
    },
    "--json": {
        "type": Path,
        "metavar": "FILE",
        "help": "JSON file for the results, written after every case",
    },
    "--plot": {"type": Path, "metavar": "FILE", "help": "PNG file for the plot"},
    "--only": {"metavar": "TEXT", "help": "measure only cases with this text in their name"},
    "--device": {
        "choices": ("cuda", "cpu"),
        "help": "device to run on (default: a GPU if there is one)",
    },
    "--heads": {"type": parse_sizes, "help": "numbers of attention heads, separated by commas"},
    "--seconds-per-row": {"type": seconds, "help": "how long to repeat each measurement, in s"},
    "--time-limit": {"type": seconds, "help": "start no case after this many seconds"},
    "--seed": {"type": int, "help": "seed of the weights and inputs"},
}


def add_common(parser: Parser, **defaults: Any) -> None:
    """Add some of the options that several benchmarks have.

    Args:
        parser: Of the benchmark.
        defaults: Default by option; ``seed=1`` adds ``--seed`` with the default 1.
    """
    for name, default in defaults.items():
        option = name if name in _COMMON else "--" + name.replace("_", "-")
        parser.add_argument(option, default=default, **_COMMON[option])


def add_dims(parser: argparse.ArgumentParser, dims: dict[str, int]) -> None:
    """Add an option for every dimension of the layer."""
    for name, size in dims.items():
        parser.add_argument(f"--{name}", type=count, default=size, help=_MEANING[name])


def dims_of(args: argparse.Namespace) -> dict[str, int]:
    """The layer's dimensions, by the names of ``DIMS``."""
    return {name: getattr(args, name.replace("-", "_")) for name in DIMS}


def parse(parser: Parser, argv: Sequence[str] | None, name: str = "") -> argparse.Namespace:
    """Parse the command line, and check that its files can be read and written.

    Args:
        parser: Of the benchmark.
        argv: Arguments; None for those of the process.
        name: Of the JSON file and the plot in the folder, where there is one.

    Returns:
        With ``json`` and ``plot``, the files to write (or None), and ``begin``, the time now by
        ``time.monotonic``.

    Raises:
        ValueError: After wrong input, naming the option.
    """
    args = parser.parse_args(argv)
    args.begin = time.monotonic()
    for file in getattr(args, "render", None) or ():
        if not file.is_file():
            raise ValueError(f"--render must be JSON that this script wrote; got {file}")
    if hasattr(args, "folder"):
        args.json, args.plot = args.folder / f"{name}.json", args.folder / f"{name}.png"
        require_writable(folders={"folder": args.folder})
    else:
        args.plot = getattr(args, "plot", None)
        require_writable(files={"--json": args.json, "--plot": args.plot})
    return args


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
