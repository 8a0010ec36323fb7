"""A model's dimensions, router, RoPE and norms, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from checkpoint_conversion.config_fields import (
    MOST_EXPERTS,
    MOST_EXPERTS_OF_ALL_LAYERS,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_MTP_LAYERS,
    MOST_POSITIONS,
    MOST_VOCABULARY,
    MOST_WIDTH,
    Fields,
    dtype_name,
    shown,
)
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.indexer import Indexer, read_indexer
from checkpoint_conversion.model_type import (
    MODELS,
    ModelType,
    Refused,
    TextAndImages,
    convertible,
    find_model_type,
    model_fields,
    model_of,
)
from checkpoint_conversion.mup import MUP, read_scales
from checkpoint_conversion.quantisation import FP8_BLOCK, check_quantisation, scheme_of
from checkpoint_conversion.rotary import Rotary, read_rotary
from checkpoint_conversion.routing import Routing, read_routing

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SUMMARY = "config.json describes no model that can be converted:"
_DTYPE_KEYS = ("torch_dtype", "dtype")
_MTP_LAYERS = "num_nextn_predict_layers"
# Dimensions that every model has: the field of ModelConfig -> that of config.json, Megatron's
# argument, the largest value.
DIMENSIONS = {
    "num_layers": ("num_hidden_layers", "num_layers", MOST_LAYERS),
    "hidden_size": ("hidden_size", "hidden_size", MOST_WIDTH),
    "ffn_hidden_size": ("intermediate_size", "ffn_hidden_size", MOST_WIDTH),
    "num_attention_heads": ("num_attention_heads", "num_attention_heads", MOST_HEADS),
    "kv_lora_rank": ("kv_lora_rank", "kv_lora_rank", MOST_WIDTH),
    "qk_nope_head_dim": ("qk_nope_head_dim", "qk_head_dim", MOST_WIDTH),
    "qk_rope_head_dim": ("qk_rope_head_dim", "qk_pos_emb_head_dim", MOST_WIDTH),
    "v_head_dim": ("v_head_dim", "v_head_dim", MOST_WIDTH),
}


def text_fields(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config.json of the text model, for a model that may also have images."""
    whole, text = find_model_type(config.get("model_type")), config.get("text_config")
    if not isinstance(whole, TextAndImages) or not isinstance(text, dict):
        return config
    fields = {"model_type": whole.text_model, **text}
    # Fields of the whole model take precedence.
    for name in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"):
        if config.get(name) is not None:
            fields[name] = config[name]
    model = find_model_type(fields["model_type"])
    if fields.get("architectures") is None and isinstance(model, ModelType):
        fields["architectures"] = [model.architectures[0]]
    return fields


def _known(config: Mapping[str, object]) -> ModelType:
    """The model type, or a CheckpointError that says why it cannot be converted."""
    fields = Fields(config, [])
    found, text = fields.raw("model_type"), fields.raw("text_config")
    model = find_model_type(found)
    with_images = [one.name for one in MODELS if isinstance(one, TextAndImages)]
    if isinstance(model, ModelType):
        return model
    if isinstance(model, Refused):
        fields.problems.append(f"model_type {found!r} has {model.has}")
    elif isinstance(model, TextAndImages):
        fields.wrong("text_config", "an object")
    elif isinstance(text, dict) and isinstance(
        refused := find_model_type(text.get("model_type")), Refused
    ):
        inner = shown(text.get("model_type"))
        fields.problems.append(f"text_config.model_type {inner} has {refused.has}")
    elif isinstance(text, dict):
        inner = shown(text.get("model_type"))
        fields.problems.append(
            f"model_type {shown(found)} has a text model ({inner}) and more; only "
            f"{' or '.join(with_images)}'s is taken out of it"
        )
    else:
        fields.wrong("model_type", " or ".join(map(repr, (*convertible(), *with_images))))
    raise CheckpointError(_SUMMARY, fields.problems)


def _check_supported(fields: Fields, model: ModelType) -> None:
    """Record every field with a value that the converter does not support."""
    names, accepted = fields.raw("architectures"), [[name] for name in model.architectures]
    if names is not None and names not in accepted:
        fields.wrong("architectures", " or ".join(map(repr, accepted)))
    for path, only in model.all_only.items():
        inner, name = fields.at(path)
        if inner is not None:
            inner.only(name, only.value, only.accepted)
    read_dtype(fields)
    check_quantisation(fields)


def read_dtype(fields: Fields) -> torch.dtype | None:
    """The dtype that config.json announces, under either of its names."""
    found = [
        DTYPES[fields.choice(name, tuple(DTYPES))]
        for name in ("dtype", "torch_dtype")
        if fields.given(name)
    ]
    if len(set(found)) > 1:
        fields.wrong("dtype", f"the same as torch_dtype, {shown(fields.raw('torch_dtype'))}")
    return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions of a model, which determine its tensors and their shapes.

    Attributes:
        model_type: As in config.json, one that can be converted.
        vocab_size: Rows of the embedding, without padding.
        ffn_hidden_size: Width of dense layers.
        q_lora_rank: None if the query is projected directly.
        moe_layers: For each decoder layer, whether it is a mixture of experts (MoE).
        num_experts: Number of routed experts of a MoE layer; 0 without MoE layers.
        moe_ffn_hidden_size: Width of one routed expert.
        num_shared_experts: Number of shared experts, each ``moe_ffn_hidden_size`` wide.
        router_bias: Whether MoE layers have an ``e_score_correction_bias``.
        indexer: Of models with sparse attention; None for dense ones.
        mtp_layers: Number of multi-token-prediction layers in the checkpoint.
        tied_embeddings: Whether the output layer is the embedding.
        hugging_face: The whole config.json (of a model with images, its text model's), as read or
            as it would be written; never changed in place.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_layers: tuple[bool, ...]
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    num_shared_experts: int = 0
    router_bias: bool = False
    indexer: Indexer | None = None
    mtp_layers: int = 0
    tied_embeddings: bool = False
    hugging_face: dict = field(default_factory=dict, compare=False)

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, object]) -> ModelConfig:
        """Read what config.json holds, in the style of transformers 4 or 5.

        ``mtp_layers`` is what the file announces; transformers announces one whatever it writes.

        Raises:
            CheckpointError: Listing everything that is missing, of another type, out of range, or
                that cannot be converted.
        """
        if not isinstance(config, Mapping):
            raise CheckpointError(f"config.json must hold an object, got {shown(config)}")
        config = text_fields(config)
        model = _known(config)
        fields = model_fields(model, config)
        _check_supported(fields, model)
        dimensions = _dimensions(fields)
        result = cls(
            model_type=model.name,
            **dimensions,
            **_mixture_of_experts(fields, model, dimensions["num_layers"]),
            indexer=read_indexer(fields, model, dimensions["num_layers"]),
            mtp_layers=fields.integer(_MTP_LAYERS, MOST_MTP_LAYERS, least=0, default=0),
            tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
            hugging_face=dict(config),
        )
        # These are not dimensions, but writing another format needs them.
        read_function(fields, result)
        fields.raise_problems(_SUMMARY)
        return result

    @property
    def model(self) -> ModelType:
        """The declaration of its model type."""
        return model_of(self.model_type)

    @property
    def fields(self) -> Fields:
        """The fields of its config.json, with problems of their own."""
        return model_fields(self.model, self.hugging_face)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights according to config.json; None if it does not say."""
        return read_dtype(self.fields)

    @property
    def quantisation(self) -> str | None:
        """How its weights are quantised, for reports; None if they are not."""
        return scheme_of(self.hugging_face.get("quantization_config"))

    def without_quantisation(self) -> ModelConfig:
        """The config to write with weights that are not quantised."""
        fields = {k: v for k, v in self.hugging_face.items() if k != "quantization_config"}
        return dataclasses.replace(self, hugging_face=fields)

    def with_quantisation(self, scales: str) -> ModelConfig:
        """The config to write with FP8 weights in blocks of 128 x 128."""
        quantisation: dict[str, object] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(FP8_BLOCK),
        }
        if scales == "ue8m0":
            quantisation["scale_fmt"] = scales
        return self.quantised_like(quantisation)

    def quantised_like(self, quantisation: object) -> ModelConfig:
        """The config to write with another one's ``quantization_config``."""
        return self._written_with(quantization_config=quantisation)

    def with_dtype(self, dtype: torch.dtype) -> ModelConfig:
        """The config to write with weights of ``dtype``."""
        keys = [key for key in _DTYPE_KEYS if key in self.hugging_face] or _DTYPE_KEYS[:1]
        return self._written_with(**dict.fromkeys(keys, dtype_name(dtype)))

    def with_mtp_layers(self, count: int) -> ModelConfig:
        """The config to write with ``count`` MTP layers."""
        changed = dataclasses.replace(self, mtp_layers=count)
        name = self.fields.name(_MTP_LAYERS)
        if count == self.hugging_face.get(name, 0):
            return changed
        return changed._written_with(**{name: count})

    def _written_with(self, **fields: object) -> ModelConfig:
        return dataclasses.replace(self, hugging_face={**self.hugging_face, **fields})


@dataclass(frozen=True, kw_only=True)
class ModelFunction:
    """What a model computes with its tensors, besides their shapes.

    Attributes:
        norm_epsilon: Epsilon of the norms around attention and MLP, with which ``mup`` goes. Norms
            inside the attention have 1e-6 in Hugging Face's models, whatever this is.
        mup: Megatron's arguments for scaled embeddings and logits.
        routing: None without MoE layers.
    """

    rotary: Rotary
    norm_epsilon: float
    max_position_embeddings: int
    mup: dict[str, object]
    routing: Routing | None


def read_function(fields: Fields, config: ModelConfig) -> ModelFunction:
    """Read what a model computes from the fields of its config.json."""
    routing = None
    if config.num_experts:
        routing = read_routing(fields, config.model, config.num_experts)
    residual, mup = read_scales(fields) if config.model.mup else (1.0, {MUP: False})
    return ModelFunction(
        rotary=read_rotary(fields, config.model, _rotary_part(config)),
        norm_epsilon=fields.number("rms_norm_eps", 1e-12, 1.0) / residual**2,
        max_position_embeddings=fields.integer("max_position_embeddings", MOST_POSITIONS),
        mup=mup,
        routing=routing,
    )


def _rotary_part(config: ModelConfig) -> float:
    """``partial_rotary_factor``: fraction of rotary channels in what transformers calls a head."""
    if not config.model.rotary_part_of_head:
        return 1.0
    return config.qk_rope_head_dim / (config.qk_nope_head_dim + config.qk_rope_head_dim)


def _dimensions(fields: Fields) -> dict:
    heads, groups = fields.raw("num_attention_heads"), fields.raw("num_key_value_heads")
    if None not in (heads, groups) and groups != heads:
        fields.wrong("num_key_value_heads", f"num_attention_heads {shown(heads)}")
    dimensions = {
        "vocab_size": fields.integer("vocab_size", MOST_VOCABULARY),
        "q_lora_rank": fields.integer_or_null("q_lora_rank", MOST_WIDTH),
        **{field: fields.integer(name, most) for field, (name, _, most) in DIMENSIONS.items()},
    }
    rope = fields.raw("qk_rope_head_dim")
    if isinstance(rope, int) and rope % 2:
        fields.wrong("qk_rope_head_dim", "even")
    return dimensions


def _mixture_of_experts(fields: Fields, model: ModelType, layers: int) -> dict:
    dense: dict = {"moe_layers": (False,) * layers}
    if not model.experts or fields.null("n_routed_experts"):
        return dense
    moe_layers = _moe_layers(fields, model, layers)
    if not any(moe_layers):
        return dense
    experts = fields.integer("n_routed_experts", MOST_EXPERTS)
    if experts * layers > MOST_EXPERTS_OF_ALL_LAYERS:
        fields.wrong(
            "n_routed_experts",
            f"at most {MOST_EXPERTS_OF_ALL_LAYERS} in all {layers} layers together",
        )
    shared = fields.integer_or_null("n_shared_experts", MOST_EXPERTS, least=0)
    return {
        "moe_layers": moe_layers,
        "num_experts": experts,
        "moe_ffn_hidden_size": fields.integer("moe_intermediate_size", MOST_WIDTH),
        "num_shared_experts": shared or 0,
        "router_bias": model.router_bias,
    }


def _moe_layers(fields: Fields, model: ModelType, layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is a mixture of experts."""
    if model.lists_layers and fields.given("mlp_layer_types"):
        kinds = fields.raw("mlp_layer_types")
        known = ("dense", "sparse")
        if isinstance(kinds, list) and len(kinds) == layers and all(k in known for k in kinds):
            return tuple(kind == "sparse" for kind in kinds)
        fields.wrong("mlp_layer_types", f"a list of {layers}, each 'dense' or 'sparse'")
        return (False,) * layers
    first = fields.integer("first_k_dense_replace", MOST_LAYERS, least=0)
    every = fields.integer("moe_layer_freq", MOST_LAYERS, default=1)
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))
