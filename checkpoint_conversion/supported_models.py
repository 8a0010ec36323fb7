"""Which models' config.json can be converted, and what of them cannot."""

from __future__ import annotations

import torch

from checkpoint_conversion.config_fields import Fields, shown

# Model type: architectures that have its tensors. Moonlight and R1 are DeepSeek-V3s.
_ARCHITECTURES = {
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "kimi_k2": ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
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
# DeepSeek-V3.2's sparse attention has tensors of its own.
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


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
            fields.wrong(name, "left out: sparse attention (DeepSeek-V3.2) cannot be converted")
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
