"""The model of a command line: what its options give a preset's or a checkpoint's model."""

from __future__ import annotations

import argparse

from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from training.options import flag_of, name_of
from training.presets import COMMON, INDEXER, Model
from training.refusals import require_indexer

_MAY_BE_ZERO = {"qk_pos_emb_head_dim", "mscale", "mscale_all_dim", "moe_aux_loss_coeff"}
# Here 0 on the command line means that the model has no such part.
_ZERO_IS_NONE = {"q_lora_rank", "num_experts", "moe_shared_expert_intermediate_size"}


def complete_model(args: argparse.Namespace, model: Model) -> None:
    """Make the arguments of a model consistent, with None for the parts that it does not have.

    Args:
        args: The command line, with the values of ``model`` where it has none.
        model: The preset's or the checkpoint's.

    Raises:
        ValueError: If a size is out of range or sizes do not fit each other.
    """
    _complete_sizes(args)
    _complete_experts(args, model)
    _complete_indexer(args)


def _complete_sizes(args: argparse.Namespace) -> None:
    for name in COMMON:
        value = getattr(args, name)
        if value is None or isinstance(value, (str, bool, list)):
            continue
        may_be_zero = name in _MAY_BE_ZERO | _ZERO_IS_NONE
        if value < 0 or (value == 0 and not may_be_zero):
            least = "at least 0" if may_be_zero else "above 0"
            raise ValueError(f"{flag_of(name)} must be {least}, got {value}")
        if value == 0 and name in _ZERO_IS_NONE:
            setattr(args, name, None)
    if args.qk_pos_emb_head_dim % 2:
        raise ValueError(f"--qk-pos-emb-head-dim must be even, got {args.qk_pos_emb_head_dim}")
    args.kv_channels = args.hidden_size // args.num_attention_heads
    match args.moe_aux_loss_coeff:
        case [coefficient]:
            args.moe_aux_loss_coeff = coefficient
    if args.experimental_attention_variant == "none":
        args.experimental_attention_variant = None


def _complete_experts(args: argparse.Namespace, model: Model) -> None:
    """Make ``moe_layer_freq`` a list with an entry for each layer, and check the experts."""
    freq, pattern = args.moe_layer_freq, model["moe_layer_freq"]
    if not args.num_experts:
        if isinstance(freq, str) and "--num-experts" not in args.given:
            raise ValueError(f"--moe-layer-freq {freq} needs --num-experts")
        _make_dense(args)
        return
    if isinstance(freq, str):
        args.moe_layer_freq = list(moe_layers(parse_moe_layer_freq(freq), args.num_layers))
    elif not isinstance(pattern, list):
        args.moe_layer_freq = [1] * args.num_layers
    elif args.num_layers != model["num_layers"]:
        dense = min(pattern.count(0), args.num_layers)
        args.moe_layer_freq = [0] * dense + [1] * (args.num_layers - dense)
    if not any(args.moe_layer_freq):
        _make_dense(args)
        return
    experts, topk, groups = args.num_experts, args.moe_router_topk, args.moe_router_num_groups
    if topk > experts:
        raise ValueError(
            f"{name_of(args, 'moe_router_topk')} must be at most {name_of(args, 'num_experts')}, "
            f"{experts}, got {topk}"
        )
    if groups and experts % groups:
        raise ValueError(
            f"{name_of(args, 'num_experts')} must be divisible by its {groups} routing groups, "
            f"got {experts}"
        )


def _make_dense(args: argparse.Namespace) -> None:
    moe = {name: value for name, value in COMMON.items() if name.startswith("moe_")}
    vars(args).update(moe, num_experts=None, moe_layer_freq=1)


def _complete_indexer(args: argparse.Namespace) -> None:
    """Make the arguments of sparse attention complete, or absent."""
    if args.new_indexer:
        args.experimental_attention_variant = "dsa"
    has_indexer = args.experimental_attention_variant is not None
    require_indexer(args.given, args.train_only, has_indexer)
    if not has_indexer:
        vars(args).update({name: COMMON[name] for name in INDEXER})
        args.dsa_indexer_use_sparse_loss = False
        return
    _check_indexer(args)
    if args.scale_down > 1 and "--dsa-indexer-topk" not in args.given:
        # Far enough below the sequence length that there is a choice.
        args.dsa_indexer_topk = min(args.dsa_indexer_topk, max(1, args.seq_length // 4))
    if args.dsa_indexer_use_sparse_loss is None:
        args.dsa_indexer_use_sparse_loss = not args.train_only
    elif args.train_only and args.dsa_indexer_use_sparse_loss:
        raise ValueError(
            "--train-only indexer excludes --dsa-indexer-use-sparse-loss: while an indexer warms "
            "up, its loss is over all keys that a query sees"
        )
    if args.dsa_indexer_loss_coeff is None:
        args.dsa_indexer_loss_coeff = 1.0
    coefficient = args.dsa_indexer_loss_coeff
    if not 0 <= coefficient < float("inf"):
        raise ValueError(f"--dsa-indexer-loss-coeff must be at least 0, got {coefficient}")
    if args.train_only and coefficient == 0:
        raise ValueError("--train-only indexer needs a --dsa-indexer-loss-coeff above 0, got 0")


def _check_indexer(args: argparse.Namespace) -> None:
    required = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
    missing = [flag_of(name) for name in required if getattr(args, name) is None]
    if missing:
        raise ValueError(f"a model with an indexer needs {', '.join(missing)}, which has no value")
    width, rotated = args.dsa_indexer_head_dim, args.qk_pos_emb_head_dim
    name = name_of(args, "dsa_indexer_head_dim")
    if width < rotated:
        raise ValueError(
            f"{name} must be at least {name_of(args, 'qk_pos_emb_head_dim')}, {rotated}, whose "
            f"channels are rotated; got {width}"
        )
    if args.dsa_indexer_rotate_activation and width & (width - 1):
        raise ValueError(
            f"{name} must be a power of two, got {width}; --no-dsa-indexer-rotate-activation "
            "leaves the Hadamard matrix out"
        )
