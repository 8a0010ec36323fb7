"""The command line of train.py: our options, a preset's or a checkpoint's model, and Megatron's.

A value on the command line wins over one of the model, which wins over our defaults.
"""

from __future__ import annotations

import argparse
import functools

from checkpoint_conversion.megatron_args import COMMON_ARGS
from console.parser import Parser
from console.ranks import local_rank, rank, world_size
from training import options
from training.megatron_loop import add_megatron_arguments
from training.model_arguments import complete_model
from training.options import flags_of, given_options, name_of
from training.presets import COMMON, INDEXER, Model, get_preset, scale_down

# The same in every run. The fused kernels need apex or a CUDA extension; MLA refuses fused RoPE.
_FIXED: dict[str, object] = {
    **COMMON_ARGS,
    "untie_embeddings_and_output_weights": True,
    "moe_router_pre_softmax": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_dtype": "fp32",
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_swiglu_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "calculate_per_token_loss": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "dataloader_type": "single",
    "num_workers": 0,
    # Runs end with one line about a gradient that is not finite, which we check.
    "check_for_nan_in_loss_and_grad": False,
    "rerun_mode": "disabled",
    "logging_level": 30,
    # A resumed run takes its rates from the command line.
    "override_opt_param_scheduler": True,
    "fp8_recipe": "tensorwise",
}
# What may be set for a checkpoint's model, too: the length can be extended, balancing is used by
# training only, and Megatron's own checkpoints do not contain this epsilon.
FREE = {"max_position_embeddings", "moe_aux_loss_coeff", "latent_norm_epsilon"}
# Saved in a checkpoint: which rows of the embedding may be padding.
_VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by")


def parse_arguments(argv: list[str], script: str = "train.py") -> argparse.Namespace:
    """Parse ``argv``: types, choices and options that exclude each other; nothing is read.

    Returns:
        Megatron's arguments and ours, without the model; ``given`` has the options that are on the
        command line.

    Raises:
        ValueError: If an option is unknown, has no such value, or excludes another.
    """
    options.require_known(argv)
    options.own_parser(script).parse_known_args(argv)
    parser = _parser(script)
    args = parser.parse_args(argv)
    if args.help_megatron:
        parser.print_help()
        parser.exit()
    args.argv, args.given, args.loaded_vocabulary = argv, given_options(argv), {}
    _check_sources(args)
    return args


def with_model(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the model that they describe, of a preset or of the checkpoint.

    The vocabulary still depends on the tokenizer: see :func:`set_vocabulary`.

    Raises:
        ValueError: If a size is out of range or sizes do not fit each other.
    """
    model = _checkpoint_model(args) if args.use_checkpoint_args else _preset(args)
    parser = _parser("")
    parser.set_defaults(**{n: value for n, value in model.items() if n not in _VOCABULARY})
    known = {name: getattr(args, name) for name in ("argv", "given", "loaded_vocabulary")}
    of_process = {"rank": rank(), "world_size": world_size(), "local_rank": local_rank()}
    complete = parser.parse_args(args.argv, argparse.Namespace(**known, **of_process))
    complete.model_vocab_size = model["vocab_size"]
    complete_model(complete, model)
    return complete


def model_of(args: argparse.Namespace) -> Model:
    """The model that a complete command line describes; ``vocab_size`` counts the padding."""
    rows = getattr(args, "padded_vocab_size", None) or args.model_vocab_size
    return {name: getattr(args, name) for name in COMMON} | {"vocab_size": rows}


def set_vocabulary(args: argparse.Namespace, tokens: int) -> None:
    """Set the rows of the embedding, and what a checkpoint says of them.

    The vocabulary is ``--vocab-size`` if given; else the preset's for a released model that is not
    scaled down, or the checkpoint's; else the tokenizer's. The multiple that it is padded to does
    not depend on the tensor-parallel size, so that a checkpoint can be loaded at any.

    Args:
        args: The command line.
        tokens: Of the tokenizer.

    Raises:
        ValueError: If the vocabulary is smaller than the tokenizer's.
    """
    size, multiple = args.vocab_size, args.make_vocab_size_divisible_by
    released = args.preset != "tiny" and args.scale_down == 1
    if args.use_checkpoint_args:
        size, multiple = args.model_vocab_size, 1
    elif size is None:
        size = args.model_vocab_size if released else tokens
    if size < tokens:
        raise ValueError(
            f"{name_of(args, 'vocab_size')} must be at least the tokenizer's {tokens}, got {size}"
        )
    args.padded_vocab_size = -(-size // multiple) * multiple
    # As in Megatron's own arguments, ``vocab_size`` is None where a tokenizer's was padded.
    args.vocab_size = size if size == args.padded_vocab_size else None
    vars(args).update(args.loaded_vocabulary)


def _parser(script: str) -> argparse.ArgumentParser:
    """The parser of all arguments, with the defaults of a run without a preset."""
    parser = _megatron_parser()
    parser.prog = script
    parser.set_defaults(**{**COMMON, **_FIXED, **options.DEFAULTS, "vocab_size": None})
    return parser


@functools.cache
def _megatron_parser() -> argparse.ArgumentParser:
    parser = Parser("", "Megatron's arguments, and those of train.py, which come last.")
    parser.conflict_handler = "resolve"
    add_megatron_arguments(parser)
    options.add_options(parser)
    # Parsed later, with the number of layers and without evaluating it.
    _action(parser, "moe_layer_freq").type = str
    for action in parser._actions:
        # argparse formats help texts, and one of Megatron's has a percent sign.
        if action.help and action.help is not argparse.SUPPRESS and "%(" not in action.help:
            action.help = action.help.replace("%%", "%").replace("%", "%%")
    return parser


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action:
    return next(action for action in parser._actions if action.dest == name)


def _check_sources(args: argparse.Namespace) -> None:
    """Check that the model is said once."""
    if not args.use_checkpoint_args:
        return
    if not args.load:
        raise ValueError("--use-checkpoint-args needs --load, the checkpoint to read them from")
    names = ["preset", "scale_down", *_VOCABULARY, *(name for name in COMMON if name not in FREE)]
    if args.new_indexer:
        # A checkpoint without an indexer does not say what a new one is like.
        names = [name for name in names if name not in INDEXER]
    twice = sorted(args.given.intersection(flag for name in names for flag in flags_of(name)))
    if twice:
        raise ValueError(
            f"--use-checkpoint-args takes the model from --load and excludes {', '.join(twice)};"
            " give one or the other"
        )


def _preset(args: argparse.Namespace) -> Model:
    model = scale_down(get_preset(args.preset), args.scale_down)
    if args.scale_down > 1 and model["dsa_indexer_topk"]:
        # Far enough below the sequence length that there is a choice.
        most = max(1, args.seq_length // 4)
        model["dsa_indexer_topk"] = min(model["dsa_indexer_topk"], most)
    return model


def _checkpoint_model(args: argparse.Namespace) -> Model:
    from training.checkpoint import load_model_args
    from training.checkpoint_args import model_from_args

    saved = load_model_args(args.load)
    model = model_from_args(saved)
    args.loaded_vocabulary = {name: getattr(saved, name, None) for name in _VOCABULARY}
    if args.new_indexer and model["experimental_attention_variant"] is not None:
        raise ValueError(
            f"--new-indexer: the model in --load {args.load} has an indexer; leave the option out "
            "to go on with it"
        )
    return model
