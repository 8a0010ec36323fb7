"""The model of a run: a preset, its scaling, and the options that set single fields of it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from checkpoint_conversion.moe_pattern import moe_layers, parse_moe_layer_freq
from training.options_named import name_of
from training.presets import ModelPreset, get_preset, scale_down


@dataclass(frozen=True)
class ModelOption:
    """An option that sets a field of a :class:`ModelPreset`.

    Attributes:
        flag: The option, under Megatron's name where Megatron has it.
        kind: Type of its value.
        help: For ``--help``.
        field: The field, where it has another name than the option.
        group: Heading in ``--help``.
        choices: All values, of a string.
        may_be_zero: Whether 0 is a value. Other numbers are positive.
        zero_is_none: Whether 0 means that the model has no such part.
        in_checkpoint: Whether checkpoints say it, so that ``--use-checkpoint-args`` excludes it.
            Not so the length, which may be extended, the balancing of experts, which only training
            uses, and the epsilon that Megatron's own checkpoints do not have.
    """

    flag: str
    kind: type
    help: str
    field: str | None = None
    group: str = "model"
    choices: tuple[str, ...] | None = None
    may_be_zero: bool = False
    zero_is_none: bool = False
    in_checkpoint: bool = True

    @property
    def name(self) -> str:
        """Of the parsed command line's attribute."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def field_name(self) -> str:
        """Of the preset's field."""
        return self.field or self.name

    def value(self, args: argparse.Namespace) -> object:
        """What the field is set to.

        Raises:
            ValueError: If it is out of range.
        """
        value = getattr(args, self.name)
        may_be_zero = self.may_be_zero or self.zero_is_none
        if self.kind is not str and (value < 0 or (value == 0 and not may_be_zero)):
            least = "at least 0" if may_be_zero else "above 0"
            raise ValueError(f"{self.flag} must be {least}, got {value}")
        return (value or None) if self.zero_is_none else value


_MOE = "mixture of experts"
MODEL_OPTIONS = (
    ModelOption("--num-layers", int, "transformer layers"),
    ModelOption("--hidden-size", int, "width of the model"),
    ModelOption("--ffn-hidden-size", int, "width of a dense layer's MLP"),
    ModelOption("--num-attention-heads", int, "heads of the attention"),
    ModelOption("--kv-lora-rank", int, "width of the latent"),
    ModelOption("--qk-head-dim", int, "of a head's query and key, without RoPE"),
    ModelOption(
        "--qk-pos-emb-head-dim", int, "of a head's query and key, with RoPE", may_be_zero=True
    ),
    ModelOption("--v-head-dim", int, "of a head's value"),
    ModelOption("--max-position-embeddings", int, "the longest sequence", in_checkpoint=False),
    ModelOption(
        "--q-lora-rank",
        int,
        "width of the compressed query; 0 projects it without compression",
        zero_is_none=True,
    ),
    ModelOption("--norm-epsilon", float, "of the layers' norms", "layernorm_epsilon"),
    ModelOption("--rope-type", str, "rotary embedding", choices=("rope", "yarn")),
    ModelOption("--rotary-base", float, "of the rotary frequencies"),
    ModelOption("--rotary-scaling-factor", float, "YaRN's extension"),
    ModelOption("--mscale", float, "YaRN's scale of the rotation", may_be_zero=True),
    ModelOption("--mscale-all-dim", float, "YaRN's scale of the softmax", may_be_zero=True),
    ModelOption(
        "--latent-norm-epsilon",
        float,
        "epsilon of the attention's own norms",
        "latent_norm_eps",
        "attention",
        in_checkpoint=False,
    ),
    ModelOption(
        "--num-experts",
        int,
        "of a layer; 0 for a dense model",
        "num_moe_experts",
        _MOE,
        zero_is_none=True,
    ),
    ModelOption("--moe-ffn-hidden-size", int, "width of an expert", None, _MOE),
    ModelOption(
        "--moe-shared-expert-intermediate-size",
        int,
        "width of all shared experts together, 0 for none",
        None,
        _MOE,
        zero_is_none=True,
    ),
    ModelOption("--moe-router-topk", int, "experts of a token", None, _MOE),
    ModelOption(
        "--moe-aux-loss-coeff",
        float,
        "of the balancing loss",
        None,
        _MOE,
        may_be_zero=True,
        in_checkpoint=False,
    ),
)
_FLAGS = {option.field_name: option.flag for option in MODEL_OPTIONS}


def flag_of(field: str) -> str:
    """The option that sets a field of a preset, or ``--field-name`` if none does."""
    return _FLAGS.get(field, "--" + field.replace("_", "-"))


def resolve_model(args: argparse.Namespace) -> ModelPreset:
    """The model that the command line describes, but for the tokenizer's vocabulary.

    Raises:
        ValueError: If a size is not positive or sizes do not fit each other.
    """
    if args.use_checkpoint_args:
        return _checkpoint_model(args)
    model = scale_down(get_preset(args.preset), args.scale_down)
    layers_before = model.num_layers
    model = model.replace(**_changes(args))
    model = model.replace(moe_layer_freq=_moe_layer_freq(args, model, layers_before))
    return _checked_moe(args, model)


def _checkpoint_model(args: argparse.Namespace) -> ModelPreset:
    # Imported late: Megatron takes seconds.
    from training.checkpoint_args import preset_from_args
    from training.start import load_model_args

    model = preset_from_args(load_model_args(args.load))
    # The embedding has the checkpoint's rows, whatever the tokenizer needs.
    args.vocab_size = args.make_vocab_size_divisible_by = model.vocab_size
    return _checked_moe(args, model.replace(**_changes(args)))


def _changes(args: argparse.Namespace) -> dict[str, object]:
    """Fields that the command line sets."""
    given = (option for option in MODEL_OPTIONS if getattr(args, option.name) is not None)
    changes = {option.field_name: option.value(args) for option in given}
    if changes.get("qk_pos_emb_head_dim", 0) % 2:
        raise ValueError(
            f"--qk-pos-emb-head-dim must be even, got {changes['qk_pos_emb_head_dim']}"
        )
    return changes


def _moe_layer_freq(
    args: argparse.Namespace, model: ModelPreset, layers_before: int
) -> tuple[int, ...]:
    if not model.num_moe_experts:
        if args.moe_layer_freq is not None and args.num_experts is None:
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


def padded_vocab_size(args: argparse.Namespace, model: ModelPreset, tokenizer_size: int) -> int:
    """Rows of the embedding.

    ``--vocab-size`` if given; else the preset's for a released model at its real size; else the
    tokenizer's. Padded to a multiple that does not depend on the tensor-parallel size, so that a
    checkpoint can be loaded at any.

    Raises:
        ValueError: If the vocabulary is smaller than the tokenizer's.
    """
    size = args.vocab_size
    if size is None:
        real = args.preset != "tiny" and args.scale_down == 1
        size = model.vocab_size if real else tokenizer_size
    if size < tokenizer_size:
        raise ValueError(
            f"{name_of(args, '--vocab-size')} must be at least the tokenizer's {tokenizer_size}, "
            f"got {size}"
        )
    multiple = args.make_vocab_size_divisible_by
    return -(-size // multiple) * multiple


def is_padded(args: argparse.Namespace) -> bool:
    """Whether documents are padded, so that context parallelism can cut them."""
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
    return "alltoall" if device_type == "cuda" else "allgather"
