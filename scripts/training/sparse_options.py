"""Options of sparse attention: the model's indexer, its loss, and which stage of training runs."""

from __future__ import annotations

import argparse
import dataclasses

from training.options_named import flag_of, flags_of, given_flag, name_of
from training.presets import ModelPreset

VARIANT = "experimental_attention_variant"
_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(ModelPreset)
    if field.name == VARIANT or field.name.startswith("dsa_")
}
FIELDS = tuple(_DEFAULTS)
_REQUIRED = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
_SIZES = (
    ("dsa_indexer_n_heads", int, "heads of the indexer"),
    ("dsa_indexer_head_dim", int, "width of one of them; a power of two for the Hadamard matrix"),
    (
        "dsa_indexer_topk",
        int,
        "keys that a query attends to; every query has all keys that it sees where no sequence is "
        "longer",
    ),
    ("dsa_indexer_topk_freq", int, "every N-th layer has an indexer, those between share its keys"),
    ("dsa_indexer_skip_topk_offset", int, "number of first layers that all have an indexer"),
    ("dsa_indexer_k_norm_epsilon", float, "epsilon of the norm of the indexer's keys"),
)
_SWITCHES = (
    ("dsa_indexer_rope_interleaved", "rotate neighbouring channels of the indexer (GLM-5)"),
    ("dsa_indexer_rotate_activation", "multiply its queries and keys by the Hadamard matrix"),
    ("dsa_indexer_scoring_relu", "pass the products of the indexer through a ReLU"),
)
SWITCHES = tuple(name for name, _ in _SWITCHES)
_LOSS = ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss")
_WITH_INDEXER = "--experimental-attention-variant dsa, or --preset deepseek-v3.2 or glm-5"
# How far --scale-down keeps the top-k below the sequence length, so that there is a choice.
_SCALED_SHARE = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options of sparse attention."""
    add = parser.add_argument_group("sparse attention (DSA)").add_argument
    add(
        flag_of(VARIANT),
        choices=("dsa", "none"),
        help="dsa: an indexer chooses the keys that a query attends to; none: it attends to all "
        "that it sees (default: the preset's)",
    )
    for name, kind, text in _SIZES:
        metavar = "N" if kind is int else "X"
        text = f"{text} (default: the preset's)"
        add(flag_of(name), type=kind, metavar=metavar, help=text)
    for name, text in _SWITCHES:
        text = f"{text} (default: the preset's)"
        add(flag_of(name), action=argparse.BooleanOptionalAction, help=text)
    add(
        "--dsa-indexer-loss-coeff",
        type=float,
        metavar="X",
        help="weight of the loss that the indexer learns from; 0: it does not learn (default: 1)",
    )
    add(
        "--dsa-indexer-use-sparse-loss",
        action=argparse.BooleanOptionalAction,
        help="compare the indexer with the attention over the chosen keys, not over all that a "
        "query sees (default: on, and off with --train-only)",
    )
    add(
        "--train-only",
        choices=("indexer",),
        help="the warm-up of a new indexer: no other parameter changes, and the attention is over "
        "all keys (default: all parameters are trained)",
    )
    add(
        "--new-indexer",
        action="store_true",
        help="take the weights of a dense model from --load, as --finetune does, and give it an "
        "indexer with initial weights",
    )


def flags() -> set[str]:
    """All options of an indexer's sizes."""
    return {flag for name in FIELDS for flag in flags_of(name)}


def scaled_topk(model: ModelPreset, seq_length: int) -> ModelPreset:
    """A model that was scaled down, with a top-k of at most a quarter of the sequence length."""
    if model.dsa_indexer_topk is None:
        return model
    most = max(1, seq_length // _SCALED_SHARE)
    return model.replace(dsa_indexer_topk=min(model.dsa_indexer_topk, most))


def dense(model: ModelPreset) -> ModelPreset:
    """The model without its indexer."""
    return model.replace(**_DEFAULTS)


def complete(args: argparse.Namespace, model: ModelPreset) -> ModelPreset:
    """A model whose fields of sparse attention are complete, or all absent.

    Args:
        args: The command line.
        model: With the sizes of the command line.

    Raises:
        ValueError: If a size is missing, does not fit, or is of no use.
    """
    if args.new_indexer:
        if getattr(args, VARIANT) == "none":
            raise ValueError(f"--new-indexer needs {flag_of(VARIANT)} dsa, got none")
        model = model.replace(**{VARIANT: "dsa"})
    if getattr(model, VARIANT) is None:
        useless = [name for name in (*FIELDS, *_LOSS) if getattr(args, name) not in (None, "none")]
        if useless:
            raise ValueError(
                f"{given_flag(args, useless[0])} needs a model with an indexer: {_WITH_INDEXER}"
            )
        return dense(model)
    missing = [flag_of(name) for name in _REQUIRED if getattr(model, name) is None]
    if missing:
        raise ValueError(f"a model with an indexer needs {', '.join(missing)}, which has no value")
    _check_width(args, model)
    return model


def _check_width(args: argparse.Namespace, model: ModelPreset) -> None:
    flag, width = flag_of("dsa_indexer_head_dim"), model.dsa_indexer_head_dim
    assert width is not None
    if width < model.qk_pos_emb_head_dim:
        raise ValueError(
            f"{name_of(args, flag)} must be at least {name_of(args, '--qk-pos-emb-head-dim')}, "
            f"{model.qk_pos_emb_head_dim}, whose channels are rotated; got {width}"
        )
    if model.dsa_indexer_rotate_activation and width & (width - 1):
        raise ValueError(
            f"{name_of(args, flag)} must be a power of two, got {width}; "
            "--no-dsa-indexer-rotate-activation leaves the Hadamard matrix out"
        )


def check(args: argparse.Namespace) -> None:
    """Check which stage runs, and fill in the defaults of the indexer's loss.

    Raises:
        ValueError: If options contradict each other.
    """
    sparse = getattr(args.model, VARIANT) is not None
    if args.new_indexer and not args.load:
        raise ValueError("--new-indexer needs --load, the dense checkpoint to start from")
    if args.train_only and not sparse:
        raise ValueError(
            f"--train-only {args.train_only} needs a model with an indexer: {_WITH_INDEXER}"
        )
    if sparse and args.attention != "absorbed":
        raise ValueError(
            "--attention must be absorbed for a model with sparse attention, got "
            f"{args.attention}: Megatron's MLASelfAttention is dense"
        )
    if args.train_only and args.dsa_indexer_use_sparse_loss:
        raise ValueError(
            "--train-only indexer excludes --dsa-indexer-use-sparse-loss: while an indexer warms "
            "up, its loss is over all keys that a query sees"
        )
    coefficient = args.dsa_indexer_loss_coeff
    if coefficient is not None and not 0 <= coefficient < float("inf"):
        raise ValueError(f"--dsa-indexer-loss-coeff must be at least 0, got {coefficient}")
    if args.train_only and coefficient == 0:
        raise ValueError("--train-only indexer needs a --dsa-indexer-loss-coeff above 0, got 0")
    if sparse and coefficient is None:
        args.dsa_indexer_loss_coeff = 1.0
    if sparse and args.dsa_indexer_use_sparse_loss is None:
        args.dsa_indexer_use_sparse_loss = not args.train_only
