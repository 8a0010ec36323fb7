"""Names of options in error messages: the option itself if it was given, else its source."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

# Fields of a ModelPreset whose option has Megatron's name instead of the field's.
_FLAGS = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "latent_norm_eps": "--latent-norm-epsilon",
}


def flag_of(name: str) -> str:
    """The option that sets ``name``, an attribute of the command line or a field of a preset."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def flags_of(name: str) -> tuple[str, str]:
    """The options that set ``name`` if it is a switch: on, and off."""
    flag = flag_of(name)
    return flag, f"--no-{flag.removeprefix('--')}"


def given_flag(args: argparse.Namespace, name: str) -> str:
    """The option on the command line that sets ``name``."""
    return next((flag for flag in flags_of(name) if flag in args.given), flag_of(name))


def given_options(argv: Iterable[str]) -> frozenset[str]:
    """The options on a command line, which must not be abbreviated."""
    return frozenset(word.partition("=")[0] for word in argv if word.startswith("--"))


def name_of(args: argparse.Namespace, flag: str) -> str:
    """``"--num-layers"``, or ``"num_layers of the preset tiny"`` if it is not on the command line.

    Args:
        args: The command line, with ``given``, its options.
        flag: An option of the model.
    """
    if flag in args.given:
        return flag
    source = "checkpoint in --load" if args.use_checkpoint_args else f"preset {args.preset}"
    return f"{_attribute(flag)} of the {source}"


def own_name_of(args: argparse.Namespace, flag: str) -> str:
    """``"--seq-length"``, or ``"the default seq_length"``."""
    return flag if flag in args.given else f"the default {_attribute(flag)}"


def value_of(args: argparse.Namespace, flag: str) -> str:
    """``"--micro-batch-size 8"``, or ``"the default micro_batch_size 8"``."""
    return f"{own_name_of(args, flag)} {getattr(args, _attribute(flag))}"


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
