"""The command line of train.py: our options, a preset's or a checkpoint's model, and Megatron's.

A value on the command line wins over one of the model, which wins over our defaults.
"""

from __future__ import annotations

import argparse
import functools

from checkpoint_conversion.megatron_args import COMMON_ARGS
from console.parser import Parser
from console.ranks import local_rank, rank, world_size
from training import checkpoint, options
from training.checkpoint_args import model_from_args
from training.megatron_loop import add_megatron_arguments
from training.model_arguments import complete_model
from training.options import name_of
from training.presets import COMMON, Model, get_preset, scale_down
from training.refusals import VOCABULARY, parse_own

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


def parse_arguments(argv: list[str], script: str = "train.py") -> argparse.Namespace:
    """Parse ``argv``, and find the model that it describes, a preset's or that of a checkpoint.

    The vocabulary still depends on the tokenizer: see :func:`set_vocabulary`.

    Returns:
        Megatron's arguments and ours; ``given`` has the options that are on the command line.

    Raises:
        ValueError: If an option is unknown, has no such value, or excludes another; or if sizes of
            the model do not fit each other.
    """
    own, parser = parse_own(argv, script), _megatron_parser()
    parser.prog = script
    if own.help_megatron:
        parser.print_help()
        parser.exit()
    if own.use_checkpoint_args:
        model, vocabulary = _checkpoint_model(own)
    else:
        model, vocabulary = scale_down(get_preset(own.preset), own.scale_down), {}
    of_model = {name: value for name, value in model.items() if name not in VOCABULARY}
    parser.set_defaults(**{**_FIXED, **options.DEFAULTS, "vocab_size": None, **of_model})
    of_process = {"rank": rank(), "world_size": world_size(), "local_rank": local_rank()}
    args = parser.parse_args(argv, argparse.Namespace(given=own.given, **of_process))
    args.loaded_vocabulary, args.model_vocab_size = vocabulary, model["vocab_size"]
    complete_model(args, model)
    return args


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


@functools.cache
def _megatron_parser() -> argparse.ArgumentParser:
    parser = Parser("", "Megatron's arguments, and those of train.py, which come last.")
    parser.conflict_handler = "resolve"
    add_megatron_arguments(parser)
    options.add_options(parser)
    # Parsed later, with the number of layers and without evaluating it.
    next(x for x in parser._actions if x.dest == "moe_layer_freq").type = str
    for action in parser._actions:
        # argparse formats help texts, and one of Megatron's has a percent sign.
        if action.help and action.help is not argparse.SUPPRESS and "%(" not in action.help:
            action.help = action.help.replace("%%", "%").replace("%", "%%")
    return parser


def _checkpoint_model(own: argparse.Namespace) -> tuple[Model, dict[str, object]]:
    """The model, and what the checkpoint says of its vocabulary."""
    saved = checkpoint.load_model_args(own.load)
    model = model_from_args(saved)
    if own.new_indexer and model["experimental_attention_variant"] is not None:
        raise ValueError(
            f"--new-indexer: the model in --load {own.load} has an indexer; leave the option out "
            "to go on with it"
        )
    return model, {name: getattr(saved, name, None) for name in VOCABULARY}
