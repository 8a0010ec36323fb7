"""The model of a run: a preset, its scaling, and the options that set single sizes of it."""

from __future__ import annotations

import argparse
import dataclasses

from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from training import sparse_options
from training.options_named import flag_of, flags_of, name_of
from training.presets import ModelPreset, get_preset, scale_down

_FIELDS = tuple(field.name for field in dataclasses.fields(ModelPreset))
# Fields that follow from more than the option of their name.
_DERIVED = {"vocab_size", "moe_layer_freq"}
_MAY_BE_ZERO = {"qk_pos_emb_head_dim", "mscale", "mscale_all_dim", "moe_aux_loss_coeff"}
# Here 0 on the command line means that the model has no such part.
_ZERO_IS_NONE = {"q_lora_rank", "num_moe_experts", "moe_shared_expert_intermediate_size"}
# Fields that may be set for a checkpoint's model, too: the length can be extended, balancing is
# used by training only, and Megatron's own checkpoints do not contain this epsilon.
_FREE = {"max_position_embeddings", "moe_aux_loss_coeff", "latent_norm_eps"}
# Arguments of a checkpoint that say which rows of the embedding may be padding.
_VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by")
# Options that --use-checkpoint-args excludes.
NOT_WITH_CHECKPOINT_ARGS = (
    *("--preset", "--scale-down", "--make-vocab-size-divisible-by"),
    *(flag_of(name) for name in _FIELDS if name not in _FREE),
    *(flags_of(name)[1] for name in sparse_options.SWITCHES),
)


def resolve_model(args: argparse.Namespace) -> ModelPreset:
    """The model that the command line describes; its vocabulary may still depend on the tokenizer.

    Raises:
        ValueError: If a size is out of range or sizes do not fit each other.
    """
    if args.use_checkpoint_args:
        return _checkpoint_model(args)
    scaled = scale_down(get_preset(args.preset), args.scale_down)
    if args.scale_down > 1:
        scaled = sparse_options.scaled_topk(scaled, args.seq_length)
    model = sparse_options.complete(args, scaled.replace(**_given_sizes(args)))
    model = model.replace(moe_layer_freq=_moe_layer_freq(args, model, scaled.num_layers))
    return _checked_moe(args, model)


def _checkpoint_model(args: argparse.Namespace) -> ModelPreset:
    # Imported late: Megatron takes seconds.
    from training.checkpoint_args import preset_from_args
    from training.start import load_model_args

    saved = load_model_args(args.load)
    model = preset_from_args(saved)
    # The embedding has as many rows as the checkpoint's, whatever the tokenizer needs.
    args.vocab_size = args.make_vocab_size_divisible_by = model.vocab_size
    # What the next checkpoint says of them, too.
    args.loaded_vocabulary = {name: getattr(saved, name, None) for name in _VOCABULARY}
    if args.new_indexer and model.experimental_attention_variant is not None:
        raise ValueError(
            f"--new-indexer: the model in --load {args.load} has an indexer; leave the option out "
            "to go on with it"
        )
    model = sparse_options.complete(args, model.replace(**_given_sizes(args)))
    return _checked_moe(args, model)


def _given_sizes(args: argparse.Namespace) -> dict[str, object]:
    """Fields of the model that the command line sets."""
    sizes: dict[str, object] = {}
    for name in _FIELDS:
        value = getattr(args, name, None)
        if value is None or name in _DERIVED:
            continue
        may_be_zero = name in _MAY_BE_ZERO | _ZERO_IS_NONE
        if not isinstance(value, (str, bool)) and (value < 0 or (value == 0 and not may_be_zero)):
            least = "at least 0" if may_be_zero else "above 0"
            raise ValueError(f"{flag_of(name)} must be {least}, got {value}")
        absent = value == "none" or (value == 0 and name in _ZERO_IS_NONE)
        sizes[name] = None if absent else value
    rope_width = args.qk_pos_emb_head_dim
    if rope_width is not None and rope_width % 2:
        raise ValueError(f"--qk-pos-emb-head-dim must be even, got {rope_width}")
    return sizes


def _moe_layer_freq(
    args: argparse.Namespace, model: ModelPreset, layers_before: int
) -> tuple[int, ...]:
    if not model.num_moe_experts:
        if args.moe_layer_freq is not None and args.num_moe_experts is None:
            raise ValueError(f"--moe-layer-freq {args.moe_layer_freq} needs --num-experts")
        return ()
    if args.moe_layer_freq is not None:
        return moe_layers(parse_moe_layer_freq(args.moe_layer_freq), model.num_layers)
    if model.num_layers == layers_before:
        return model.moe_layer_freq
    dense = min(model.moe_layer_freq.count(0), model.num_layers)
    return (0,) * dense + (1,) * (model.num_layers - dense)


def _checked_moe(args: argparse.Namespace, model: ModelPreset) -> ModelPreset:
    if not any(model.moe_layer_freq):
        return model.replace(num_moe_experts=None, moe_layer_freq=())
    if model.moe_router_topk > model.num_moe_experts:
        raise ValueError(
            f"{name_of(args, '--moe-router-topk')} must be at most "
            f"{name_of(args, '--num-experts')}, {model.num_moe_experts}, "
            f"got {model.moe_router_topk}"
        )
    groups = model.moe_router_num_groups
    if groups and model.num_moe_experts % groups:
        raise ValueError(
            f"{name_of(args, '--num-experts')} must be divisible by its {groups} routing groups, "
            f"got {model.num_moe_experts}"
        )
    return model


def vocab_size(args: argparse.Namespace, model: ModelPreset, tokenizer_size: int) -> int:
    """Size of the vocabulary without padding.

    ``--vocab-size`` if given; else the preset's for a released model that is not scaled down; else
    the tokenizer's.

    Raises:
        ValueError: If the vocabulary is smaller than the tokenizer's.
    """
    size = args.vocab_size
    if size is None:
        released = args.preset != "tiny" and args.scale_down == 1
        size = model.vocab_size if released else tokenizer_size
    if size < tokenizer_size:
        raise ValueError(
            f"{name_of(args, '--vocab-size')} must be at least the tokenizer's {tokenizer_size}, "
            f"got {size}"
        )
    return size


def padded_vocab_size(args: argparse.Namespace, model: ModelPreset, tokenizer_size: int) -> int:
    """Number of rows of the embedding, :func:`vocab_size` padded.

    The multiple does not depend on the tensor-parallel size, so that a checkpoint can be loaded at
    any.

    Raises:
        ValueError: If the vocabulary is smaller than the tokenizer's.
    """
    size, multiple = vocab_size(args, model, tokenizer_size), args.make_vocab_size_divisible_by
    return -(-size // multiple) * multiple


def is_padded(args: argparse.Namespace) -> bool:
    """Whether documents are padded, so that context parallelism can split them."""
    return args.packed and args.context_parallel_size > 1


def transformer_impl(args: argparse.Namespace, device_type: str) -> str:
    """``--transformer-impl``, or its default on this machine."""
    if args.transformer_impl is not None:
        return args.transformer_impl
    if device_type != "cuda":
        return "local"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return "transformer_engine" if HAVE_TE else "local"


def token_dispatcher(args: argparse.Namespace, device_type: str) -> str:
    """``--moe-token-dispatcher-type``, or its default on this machine."""
    if args.moe_token_dispatcher_type is not None:
        return args.moe_token_dispatcher_type
    # While generating, ranks that share experts have different numbers of tokens.
    on_gpu_or_shared = device_type == "cuda" or args.expert_model_parallel_size > 1
    return "alltoall" if on_gpu_or_shared else "allgather"
