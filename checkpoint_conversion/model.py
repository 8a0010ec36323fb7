"""Which models can be converted, and their dimensions, read from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from checkpoint_conversion.config_fields import (
    MOST_EXPERTS,
    Fields,
    Rotary,
    dtype_name,
    read_rotary,
    shown,
)
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.indexer import INTERLEAVED, Indexer, read_indexer
from checkpoint_conversion.routing import Routing, read_routing

# Model type: architectures that have its tensors. Moonlight and R1 are DeepSeek-V3s.
_ARCHITECTURES = {
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "kimi_k2": ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM",),
    "mistral4": ("Mistral4ForCausalLM",),
    "deepseek_v32": ("DeepseekV32ForCausalLM",),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM",),
}
# Models of text and images whose text model is one of the above.
_WITH_IMAGES = {"kimi_k25": "deepseek_v3"}
# Model types with a latent attention that cannot be converted, and what they have.
_MISSING = {
    "deepseek_v4": "compressed attention (deepseek_v4), which is no multi-latent attention",
    "kimi_linear": "linear attention in most of its layers",
    "longcat_flash": (
        "latents that are scaled (mla_scale_q_lora, mla_scale_kv_lora), two attentions in a layer "
        "with a mixture of experts across both, and experts that do nothing (zero_expert_num)"
    ),
}
MODEL_TYPES = tuple(_ARCHITECTURES)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FP8_BLOCK = (128, 128)
# Other values add tensors or change what tensors mean.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_interleave": True,
}


def text_fields(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config.json of the text model, for a model that may also have images."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in _WITH_IMAGES or not isinstance(text, dict):
        return config
    fields = {"model_type": _WITH_IMAGES[kind], **text}
    # Fields of the whole model take precedence.
    for name in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"):
        if config.get(name) is not None:
            fields[name] = config[name]
    accepted = _ARCHITECTURES.get(str(fields["model_type"]))
    if fields.get("architectures") is None and accepted is not None:
        fields["architectures"] = [accepted[0]]
    return fields


def check_known(fields: Fields) -> str:
    """The model type; one that cannot be converted is recorded as a problem, with the reason."""
    found = fields.raw("model_type")
    if isinstance(found, str) and found in _MISSING:
        fields.problems.append(f"model_type {found!r} has {_MISSING[found]}")
        return MODEL_TYPES[0]
    text = fields.raw("text_config")
    if isinstance(text, dict) and found not in (*MODEL_TYPES, *_WITH_IMAGES):
        inner = shown(text.get("model_type"))
        fields.problems.append(
            f"model_type {shown(found)} has a text model ({inner}) and more; only "
            f"{', '.join(_WITH_IMAGES)}'s is taken out of it"
        )
        return MODEL_TYPES[0]
    return fields.choice("model_type", (*MODEL_TYPES, *_WITH_IMAGES))


def check_supported(fields: Fields, model_type: str) -> None:
    """Record every field with a value that the converter does not support."""
    _check_architectures(fields, model_type)
    for name, accepted in _ONLY.items():
        value = fields.raw(name)
        # 0 equals False.
        if value is not None and (type(value) is not type(accepted) or value != accepted):
            fields.wrong(name, shown(accepted))
    if model_type == "mistral4":
        _check_mistral4(fields)
    read_dtype(fields)
    _check_quantisation(fields)


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


def _check_architectures(fields: Fields, model_type: str) -> None:
    names = fields.raw("architectures")
    accepted = _ARCHITECTURES[model_type]
    if names is not None and names not in [[name] for name in accepted]:
        fields.wrong("architectures", " or ".join(repr([name]) for name in accepted))


def _check_mistral4(fields: Fields) -> None:
    if fields.given("quantization_config"):
        fields.wrong("quantization_config", "left out: Mistral 4's FP8 is not that of DeepSeek")
    rope = fields.section("rope_parameters")
    if rope is None:
        fields.wrong("rope_parameters", "an object, with rope_type 'yarn'")
        return
    rope.choice("rope_type" if rope.given("rope_type") else "type", ("yarn",))
    if rope.given("llama_4_scaling_beta") and not rope.equals("llama_4_scaling_beta", 0):
        rope.wrong(
            "llama_4_scaling_beta",
            "0: it scales queries by their position, which Megatron's MLA cannot",
        )
    for name in ("n_group", "topk_group"):
        if fields.given(name) and not fields.equals(name, 1):
            fields.wrong(name, "1: Megatron ranks Mistral 4's groups of experts otherwise")


def _check_quantisation(fields: Fields) -> None:
    section = fields.section("quantization_config")
    if section is None:
        return
    section.choice("quant_method", ("fp8",))
    section.choice("fmt", ("e4m3",), "e4m3")
    section.choice("activation_scheme", ("dynamic",), "dynamic")
    section.choice("scale_fmt", ("float", "ue8m0"), "float")
    if section.raw("weight_block_size") != list(FP8_BLOCK):
        section.wrong("weight_block_size", str(list(FP8_BLOCK)))


# Model types whose config.json may list the kind of every layer's MLP.
_LISTED_LAYERS = ("glm4_moe_lite", *INTERLEAVED)
# Bounds far above any model, so that a broken file cannot fill the memory with names.
MOST_LAYERS, MOST_HEADS, MOST_MTP_LAYERS = 2**12, 2**14, 64
MOST_WIDTH, MOST_VOCABULARY, MOST_EXPERTS_OF_ALL_LAYERS = 2**20, 2**24, 2**18
MOST_POSITIONS = 2**31
_SUMMARY = "config.json describes no model that can be converted:"
_DTYPE_KEYS = ("torch_dtype", "dtype")
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The dimensions of a model, which determine its tensors and their shapes.

    Attributes:
        model_type: As in config.json, one of ``MODEL_TYPES``.
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
        fields = Fields(config, [])
        model_type = check_known(fields)
        # For another model type, all other fields would be reported, too.
        fields.raise_problems(_SUMMARY)
        check_supported(fields, model_type)
        dimensions = _dimensions(fields)
        result = cls(
            model_type=model_type,
            **dimensions,
            **_mixture_of_experts(fields, model_type, dimensions["num_layers"]),
            indexer=read_indexer(fields, model_type, dimensions["num_layers"]),
            mtp_layers=fields.integer(
                "num_nextn_predict_layers", MOST_MTP_LAYERS, least=0, default=0
            ),
            tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
            hugging_face=dict(config),
        )
        # These are not dimensions, but writing another format needs them.
        read_function(fields, result)
        fields.raise_problems(_SUMMARY)
        return result

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the weights according to config.json; None if it does not say."""
        return read_dtype(Fields(self.hugging_face, []))

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share an FP8 scale; None if the weights are not quantised."""
        return FP8_BLOCK if self.hugging_face.get("quantization_config") else None

    @property
    def fp8_scales(self) -> str | None:
        """``"float"`` or ``"ue8m0"`` (powers of two); None if the weights are not quantised."""
        if self.fp8_block is None:
            return None
        return self.hugging_face["quantization_config"].get("scale_fmt") or "float"

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
        return self._written_with(quantization_config=quantisation)

    def with_dtype(self, dtype: torch.dtype) -> ModelConfig:
        """The config to write with weights of ``dtype``."""
        keys = [key for key in _DTYPE_KEYS if key in self.hugging_face] or _DTYPE_KEYS[:1]
        return self._written_with(**dict.fromkeys(keys, dtype_name(dtype)))

    def with_mtp_layers(self, count: int) -> ModelConfig:
        """The config to write with ``count`` MTP layers."""
        changed = dataclasses.replace(self, mtp_layers=count)
        if count == self.hugging_face.get("num_nextn_predict_layers", 0):
            return changed
        return changed._written_with(num_nextn_predict_layers=count)

    def _written_with(self, **fields: object) -> ModelConfig:
        return dataclasses.replace(self, hugging_face={**self.hugging_face, **fields})


@dataclass(frozen=True, kw_only=True)
class ModelFunction:
    """What a model computes with its tensors, besides their shapes.

    Attributes:
        norm_epsilon: Epsilon of the norms around attention and MLP. Norms inside the attention
            have 1e-6 in Hugging Face's models, whatever this is.
        routing: None without MoE layers.
    """

    rotary: Rotary
    norm_epsilon: float
    max_position_embeddings: int
    routing: Routing | None


def read_function(fields: Fields, config: ModelConfig) -> ModelFunction:
    """Read what a model computes from the fields of its config.json."""
    routing = None
    if config.num_experts:
        routing = read_routing(fields, config.model_type, config.num_experts)
    return ModelFunction(
        rotary=read_rotary(fields, _rotary_part(config)),
        norm_epsilon=fields.number("rms_norm_eps", 1e-12, 1.0),
        max_position_embeddings=fields.integer("max_position_embeddings", MOST_POSITIONS),
        routing=routing,
    )


def _rotary_part(config: ModelConfig) -> float:
    """``partial_rotary_factor``: fraction of rotary channels in what transformers calls a head."""
    if config.model_type != "mistral4":
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


def _mixture_of_experts(fields: Fields, model_type: str, layers: int) -> dict:
    dense: dict = {"moe_layers": (False,) * layers}
    if fields.null("n_routed_experts"):
        return dense
    moe_layers = _moe_layers(fields, model_type, layers)
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
        "router_bias": model_type not in ("deepseek_v2", "mistral4"),
    }


def _moe_layers(fields: Fields, model_type: str, layers: int) -> tuple[bool, ...]:
    """For each layer, whether it is a mixture of experts."""
    if model_type in _LISTED_LAYERS and fields.given("mlp_layer_types"):
        kinds = fields.raw("mlp_layer_types")
        known = ("dense", "sparse")
        if isinstance(kinds, list) and len(kinds) == layers and all(k in known for k in kinds):
            return tuple(kind == "sparse" for kind in kinds)
        fields.wrong("mlp_layer_types", f"a list of {layers}, each 'dense' or 'sparse'")
        return (False,) * layers
    default = 1 if model_type == "glm4_moe_lite" else None
    first = fields.integer("first_k_dense_replace", MOST_LAYERS, least=0, default=default)
    every = fields.integer("moe_layer_freq", MOST_LAYERS, default=1)
    return tuple(layer >= first and layer % every == 0 for layer in range(layers))
