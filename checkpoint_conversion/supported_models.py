"""Which models' config.json can be converted, and what of them cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkpoint_conversion.config_fields import Fields, shown

# Model type: architectures that have its tensors. Moonlight and R1 are DeepSeek-V3s.
_ARCHITECTURES = {
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "kimi_k2": ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM",),
    "mistral4": ("Mistral4ForCausalLM",),
}
# Models of text and images whose text model is one of them.
_WITH_IMAGES = {"kimi_k25": "deepseek_v3"}
_SPARSE = "sparse attention (DeepSeek-V3.2), whose indexer no model of plain MLA has"
# What makes models with a latent attention others than these.
_MISSING = {
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
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
# Each adds tensors, or changes what the tensors mean, if it is anything else.
_ONLY = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_interleave": True,
}
# In a config.json that does not say deepseek_v32.
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def text_fields(config: Mapping[str, object]) -> Mapping[str, object]:
    """The config.json of a text model alone, of one that may have images, too."""
    kind, text = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in _WITH_IMAGES or not isinstance(text, dict):
        return config
    fields = {"model_type": _WITH_IMAGES[kind], **text}
    # These are the whole model's, where it gives them.
    for name in ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"):
        if config.get(name) is not None:
            fields[name] = config[name]
    accepted = _ARCHITECTURES.get(str(fields["model_type"]))
    if fields.get("architectures") is None and accepted is not None:
        fields["architectures"] = [accepted[0]]
    return fields


def check_known(fields: Fields) -> str:
    """The model type; what another one has that cannot be converted is recorded."""
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
    """Record what the conversion does not know how to treat, with what it does."""
    _check_architectures(fields, model_type)
    for name, accepted in _ONLY.items():
        value = fields.raw(name)
        # 0 equals False.
        if value is not None and (type(value) is not type(accepted) or value != accepted):
            fields.wrong(name, shown(accepted))
    for name in _INDEXER:
        if fields.given(name):
            fields.wrong(name, f"left out: {_SPARSE}")
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
