"""Command lines of benchmarks, made of the options that a benchmark declares."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


def seconds(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
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


def list_of(parse: Callable[[str], Any], separator: str = ",") -> Callable[[str], list]:
    """A parser of several values of ``parse``; repeated values are dropped."""

    def parse_all(text: str) -> list:
        return list(dict.fromkeys(parse(part) for part in text.split(separator)))

    return parse_all


@dataclass(frozen=True)
class Option:
    """One option of a command line."""

    help: str  # what it means
    type: Callable[[str], Any] | None = None  # makes a value of its text
    default: Any = None  # a value, or the text of one
    more: Mapping[str, Any] = field(default_factory=dict)  # other arguments of add_argument


def number(help: str, default: int | None = None) -> Option:
    """An option that takes a whole number above 0."""
    return Option(help, count, default)


def sizes(help: str, default: str | None = None) -> Option:
    """An option that takes several, such as ``16k,32k``."""
    return Option(help, parse_sizes, default)


def flag(help: str) -> Option:
    """An option without a value."""
    return Option(help, more={"action": "store_true"}, default=False)


def one(help: str, accepted: Sequence[str], default: str | None = None) -> Option:
    """An option that takes one of some words."""
    return Option(help, default=default, more={"choices": tuple(accepted)})


def some(
    help: str, accepted: Iterable[str], default: str | None = "", separator: str = ","
) -> Option:
    """An option that takes some of these words, by default all of them."""
    words = tuple(accepted)

    def word(text: str) -> str:
        if text.strip() not in words:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(words)}, separated by commas; got {text!r}"
            )
        return text.strip()

    default = separator.join(words) if default == "" else default
    return Option(help, list_of(word, separator), default)


_FILE, _FILES = {"metavar": "FILE"}, {"nargs": "+", "metavar": "FILE.json"}
# Options that several benchmarks have; these declare the default only.
KNOWN = {
    "folder": Option("folder for the JSON file, the plot and any logs", Path),
    "render": Option(
        "measure nothing, print and plot the results in these files", Path, more=_FILES
    ),
    "json": Option("JSON file for the results, written after every case", Path, more=_FILE),
    "plot": Option("PNG file for the plot", Path, more=_FILE),
    "only": Option("measure only cases with this text in their name", more={"metavar": "TEXT"}),
    "device": one("device to run on (default: a GPU if there is one)", ("cuda", "cpu")),
    "heads": sizes("numbers of attention heads, separated by commas"),
    "seconds_per_row": Option("how long to repeat each measurement, in s", seconds),
    "time_limit": Option("start no case after this many seconds", seconds),
    "seed": Option("seed of the weights and inputs", int),
    "dense_layers": number("layers with a dense MLP"),
    "moe_layers": number("layers with experts"),
    "experts": number("routed experts of a MoE layer, those of one rank"),
    "vocab_size": number("rows of the embedding, and of the output layer"),
    "scale_down": number("divide DeepSeek's widths by this"),
    "repeats": number("how often each is measured"),
    "quick": flag("tiny cases on a CPU, to try the script; other options are added"),
}
# What --quick stands for.
_QUICK = {
    "device": "--device cpu",
    "heads": "--heads 2",
    "seconds_per_row": "--seconds-per-row 0.01",
}
_QUICK_DIMS = {
    "hidden-size": 64,
    "q-lora-rank": 32,
    "kv-lora-rank": 32,
    "qk-head-dim": 16,
    "qk-pos-emb-head-dim": 16,
    "v-head-dim": 16,
}


def declare(known: str, **options: Any) -> Mapping[str, Any]:
    """The options of a benchmark, see :func:`add_options`.

    Args:
        known: Some of ``KNOWN``, with defaults or without: ``"json device heads=16,128"``.
        options: Others by name.
    """
    pairs = (word.partition("=") for word in known.split())
    return {name: default or None for name, _, default in pairs} | options


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> None:
    """Add options to a parser.

    Args:
        parser: Of the benchmark.
        options: By name, as ``seq_lens``: an :class:`Option`, or the default of one of ``KNOWN``;
            ``dims``, the default of every dimension by its name.
    """
    for name, value in options.items():
        if name == "dims":
            for dim, size in value.items():
                parser.add_argument(f"--{dim}", type=count, default=size, help=_MEANING[dim])
            continue
        option = value if isinstance(value, Option) else replace(KNOWN[name], default=value)
        keywords = {"help": option.help, "default": option.default, **option.more}
        if option.type is not None:
            keywords["type"] = option.type
        written = name if name == "folder" else f"--{name.replace('_', '-')}"
        parser.add_argument(written, **keywords)


def quick(argv: Sequence[str], options: Mapping[str, Any], more: str) -> list[str]:
    """Arguments in which ``--quick`` has been replaced by what it stands for.

    Args:
        argv: The arguments.
        options: Of the benchmark; tiny values of those that many have.
        more: Of this one.
    """
    if "--quick" not in argv:
        return list(argv)
    others = [word for word in argv if word != "--quick"]
    tiny = [text for name, text in _QUICK.items() if name in options]
    tiny += [f"--{name} {_QUICK_DIMS[name]}" for name in options.get("dims", ())]
    # In front, so that others take precedence; behind the folder, which is no option.
    first = 1 if others and not others[0].startswith("-") else 0
    return [*others[:first], *shlex.split(" ".join([*tiny, more])), *others[first:]]


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
