"""What train.py refuses at once: before Megatron's import, which takes seconds."""

from __future__ import annotations

import argparse
import functools
import importlib.machinery
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from console.outputs import require_writable
from training.checkpoint import find_checkpoint
from training.options import DEFAULTS, flag_of, flags_of, given_options, lora_config, own_parser
from training.presets import COMMON, INDEXER, get_preset, scale_down

_DATA = "the data is that of --data, the standard library's code without it"
_TOKENIZER = "--tokenizer names a folder; without it every byte is a token"
# Megatron's arguments that would have no effect, or fail: why.
_NOT_TAKEN = {
    **dict.fromkeys(("--data-path", "--data-args-path", "--mock-data"), _DATA),
    **dict.fromkeys(("--train-data-path", "--valid-data-path", "--test-data-path"), _DATA),
    "--per-split-data-args-path": _DATA,
    **dict.fromkeys(("--tokenizer-type", "--tokenizer-model", "--vocab-file"), _TOKENIZER),
    "--merge-file": _TOKENIZER,
    "--dataloader-type": "windows of --data follow each other",
    "--full-validation": "--eval-iters says how much is evaluated",
    "--spec": "--attention chooses the layers",
    "--ckpt-format": "checkpoints are torch_dist, which every script loads",
    "--no-save-optim": "such a run could not be resumed; --finetune takes the weights alone",
    "--async-save": "a checkpoint is complete when the next step begins",
    "--save-retain-interval": "a checkpoint is complete when the next step begins",
}
# An option, the one that it needs, and what that names.
_NEEDED = (
    ("--use-checkpoint-args", "load", "the checkpoint to read them from"),
    ("--finetune", "load", "the checkpoint to take the weights from"),
    ("--new-indexer", "load", "the dense checkpoint to start from"),
    ("--save-interval", "save", "the folder"),
)
_READ = {"data": "file or folder", "tokenizer": "folder", "lora_adapter": "folder"}
# What may be set for a checkpoint's model, too: the length can be extended, balancing is used by
# training only, and Megatron's own checkpoints do not contain this epsilon.
FREE = {"max_position_embeddings", "moe_aux_loss_coeff", "latent_norm_epsilon"}
# Saved in a checkpoint: which rows of the embedding may be padding.
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by")


def parse_own(argv: list[str], script: str = "train.py") -> argparse.Namespace:
    """Our own options of a command line, and Megatron's that name files; refuses their mistakes.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    parser = own_parser(script)
    require_known(argv, parser)
    for flag in ("--load", "--save"):
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--split", default=DEFAULTS["split"], help=argparse.SUPPRESS)
    parser.add_argument("--use-checkpoint-args", action="store_true", help=argparse.SUPPRESS)
    own = parser.parse_known_args(argv)[0]
    own.given = given_options(argv)
    for flag, why in _NOT_TAKEN.items():
        if flag in own.given:
            raise ValueError(f"{flag} is not taken: {why}")
    parse_split(own.split)
    _check_model(own)
    _check_lora(own)
    for flag, needed, what in _NEEDED:
        if flag in own.given and not getattr(own, needed):
            raise ValueError(f"{flag} needs --{needed}, {what}")
    return own


def _check_model(own: argparse.Namespace) -> None:
    """Check that the model is said once, and that its attention can do what is asked for."""
    model = scale_down(get_preset(own.preset), own.scale_down)
    variant = own.experimental_attention_variant or model["experimental_attention_variant"]
    if own.use_checkpoint_args:
        _check_sources(own)
        variant = None
    elif not own.new_indexer:
        require_indexer(own.given, own.train_only, variant == "dsa")
    if own.new_indexer and own.experimental_attention_variant == "none":
        raise ValueError("--new-indexer needs --experimental-attention-variant dsa, got none")
    if own.attention == "absorbed":
        return
    for flag in ("--qk-clip", "--log-max-attention-logit"):
        if flag in own.given:
            raise ValueError(
                f"{flag} needs --attention absorbed, which records its largest scores; got "
                f"{own.attention}"
            )
    if variant == "dsa" or own.new_indexer:
        raise ValueError(only_absorbed(own.attention))


def _check_lora(own: argparse.Namespace) -> None:
    """Check that LoRA is said once, and has an attention of this package."""
    named = [f for f in ("--lora-alpha", "--lora-target-modules") if f in own.given]
    if own.lora_adapter and (twice := [*named, *(["--lora-rank"] if own.lora_rank else [])]):
        raise ValueError(f"--lora-adapter has a rank of its own and excludes {', '.join(twice)}")
    chosen = own.lora_rank is not None or own.lora_adapter is not None
    if not chosen and (alone := [*named, *(["--save-adapter"] if own.save_adapter else [])]):
        raise ValueError(f"{alone[0]} needs --lora-rank or --lora-adapter")
    if own.lora_rank is not None:
        lora_config(own)
    if chosen and own.attention != "absorbed":
        raise ValueError(f"LoRA needs --attention absorbed, got {own.attention}")
    if chosen and own.train_only:
        raise ValueError("--train-only trains an indexer alone and excludes LoRA")


def only_absorbed(attention: str) -> str:
    """What is said of a model with sparse attention and another ``--attention``."""
    return (
        f"--attention must be absorbed for a model with sparse attention, got {attention}: "
        "Megatron's MLASelfAttention is dense"
    )


def _check_sources(own: argparse.Namespace) -> None:
    names = ["preset", "scale_down", *VOCABULARY, *(name for name in COMMON if name not in FREE)]
    if own.new_indexer:
        # A checkpoint without an indexer does not say what a new one is like.
        names = [name for name in names if name not in INDEXER]
    twice = sorted(own.given.intersection(flag for name in names for flag in flags_of(name)))
    if twice:
        raise ValueError(
            f"--use-checkpoint-args takes the model from --load and excludes {', '.join(twice)};"
            " give one or the other"
        )


def require_indexer(given: frozenset[str], train_only: str | None, has_indexer: bool) -> None:
    """Refuse options of an indexer for a model without one.

    Args:
        given: The options on the command line.
        train_only: Value of ``--train-only``.
        has_indexer: Whether the model has one.
    """
    names = (*INDEXER[1:], "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss")
    useless = [flag for name in names for flag in flags_of(name) if flag in given]
    useless += [f"--train-only {train_only}"] if train_only else []
    if useless and not has_indexer:
        raise ValueError(
            f"{useless[0]} needs a model with an indexer: --experimental-attention-variant dsa, "
            "or --preset deepseek-v3.2 or glm-5"
        )


def parse_split(text: str) -> float:
    """Percentage of the tokens for training in a text such as ``"95,5"``.

    Raises:
        ValueError: If ``text`` is not two numbers whose sum is 100.
    """
    try:
        train, valid = (float(x) for x in text.split(","))
    except ValueError:
        train = valid = -1.0
    if not (train > 0 and valid >= 0 and abs(train + valid - 100) < 1e-6):
        raise ValueError(
            f"--split must be two percentages whose sum is 100, such as 95,5; got {text!r}"
        )
    return train


def check_files(own: argparse.Namespace) -> None:
    """Check that what is read is there, and that what is written can be.

    Raises:
        ValueError: Naming the option, its path and what is in the way.
    """
    for name, kind in _READ.items():
        path = getattr(own, name)
        if path is not None and not Path(path).exists():
            raise ValueError(f"{flag_of(name)}: there is no {kind} {path}")
    if own.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")
    if own.load:
        find_checkpoint(own.load)
    files = {"--metrics": own.metrics, "--plot": own.plot}
    folders = {"--save": own.save, "--save-adapter": own.save_adapter}
    require_writable(folders=folders, files=files)


def require_known(argv: Iterable[str], parser: argparse.ArgumentParser) -> None:
    """Refuse misspelt options at once: Megatron's are read from its sources, not imported.

    Args:
        argv: The command line.
        parser: Of our own options.

    Raises:
        ValueError: Naming them.
    """
    own = {flag for action in parser._actions for flag in action.option_strings}
    rest = {flag: flag.removeprefix("--").replace("-", "_") for flag in given_options(argv) - own}
    unknown = sorted(flag for flag, name in rest.items() if name not in _megatron_names())
    if unknown:
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)} (--help lists all options)")


@functools.cache
def _megatron_names() -> set[str]:
    """What may be an option of Megatron's: literals, and fields of its configs."""
    found = importlib.machinery.PathFinder.find_spec("megatron")
    names: set[str] = set()
    for root in map(Path, found.submodule_search_locations or () if found else ()):
        files = [root / "training" / "arguments.py", *root.glob("training/config/*.py")]
        files += [*root.glob("core/**/*_config.py"), root / "core" / "fault_injector.py"]
        for file in filter(Path.is_file, files):
            text = file.read_text("utf-8")
            found_here = re.findall(r"""["']--([\w-]+)["']|^    (\w+) *:""", text, re.MULTILINE)
            names |= {(option or field).replace("-", "_") for option, field in found_here}
    return names | {f"{no}_{name}" for no in ("no", "disable") for name in names}
