"""Layer shapes and the Megatron configs that describe them."""

from dataclasses import replace

import torch
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor

from absorbed_mla.heterogeneous_config import HeterogeneousMLAConfig
from tests.oracle import OracleMLA
from tests.oracle_dsa import OracleDSA

# YaRN that matters at a dozen tokens: the ramp covers some channels, not all, and both the
# concentration (mscale / mscale_all_dim) and the softmax temperature differ from one.
TINY = OracleMLA(
    hidden=32,
    heads=4,
    q_lora_rank=16,
    kv_lora_rank=24,
    nope=12,
    rope=8,
    v=20,
    norm_eps=1e-3,
    rope_type="yarn",
    rotary_base=100.0,
    scaling_factor=40.0,
    original_context=64,
    beta_fast=8.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.707,
)

# Widths that fused kernels accept; others make "auto" choose another backend.
FUSED = replace(TINY, nope=16, rope=8, v=24)

# Widths that every kernel for GPUs accepts: 128 for key and value of a head, 256 for the latent.
WIDE = replace(TINY, kv_lora_rank=256, nope=64, rope=64, v=128)

# Widths that Triton's kernels accept and that its interpreter computes quickly.
INTERPRETED = replace(TINY, kv_lora_rank=32, rope=16)

# What single models have: each alone in some, all that go together in others.
VARIANTS = {
    "gate_headwise": replace(TINY, gate="headwise", k_rope_norm=True),
    "gate_elementwise": replace(TINY, gate="elementwise", rotated=False),
    # The factor of a query takes four values within a dozen tokens.
    "query_scaling": replace(TINY, query_scaling_beta=0.7, original_context=3),
    "gate_no_rope": replace(
        TINY, q_lora_rank=None, gate="headwise", rope=0, rope_type="rope", mscale_all_dim=0.0
    ),
    "all_variants": replace(
        TINY, gate="elementwise", k_rope_norm=True, query_scaling_beta=0.7, original_context=5
    ),
}

_SHAPES = {
    "q_lora_none": replace(TINY, q_lora_rank=None),
    "no_rope": replace(TINY, rope=0, rope_type="rope", kv_lora_rank=20),
    "no_latent_norm": replace(TINY, latent_norm=False),
    "plain_rope": replace(TINY, rope_type="rope", scaling_factor=1.0, mscale_all_dim=0.0),
    "rope_32": replace(TINY, rope=32, nope=4, v=8),
    "heads_6": replace(TINY, heads=6, nope=8, v=4),
    "heads_20": replace(TINY, heads=20, nope=6, rope=4, v=10, q_lora_rank=None),
    "kv_lora_256": replace(TINY, hidden=64, kv_lora_rank=256, nope=64, rope=32, v=64),
    "kv_lora_512": replace(TINY, hidden=64, kv_lora_rank=512, nope=192, rope=64, v=256),
}


def shapes(tensor_parallel: int) -> dict[str, OracleMLA]:
    """Named shapes that differ from TINY in one respect each and divide by ``tensor_parallel``."""
    divisible = {n: mla for n, mla in _SHAPES.items() if mla.heads % tensor_parallel == 0}
    return {**divisible, "one_head_per_rank": replace(TINY, heads=tensor_parallel)}


def random_weights(layer: OracleMLA | OracleDSA, seed: int = 0) -> dict[str, Tensor]:
    """Float64 weights that keep activations near unit size; norm gains near one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in layer.weight_shapes().items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 2:
            weights[name] = noise / shape[1] ** 0.5
        else:
            weights[name] = noise / 5 + (name != "i_k_bias")
    return weights


def model_options(mla: OracleMLA) -> dict[str, object]:
    """What of the layer's function is an option, but for the epsilon."""
    return {
        "attention_output_gate": mla.gate,
        "k_rope_layernorm": mla.k_rope_norm,
        "llama_4_scaling_beta": mla.query_scaling_beta,
    }


def config_for(
    mla: OracleMLA, dtype: torch.dtype = torch.float64, **changes
) -> MLATransformerConfig:
    """Megatron's config of one such layer.

    Its ``layernorm_epsilon`` is not that of the latent norms, which is an option.
    """
    fields = {
        "num_layers": 1,
        "hidden_size": mla.hidden,
        "ffn_hidden_size": 2 * mla.hidden,
        "num_attention_heads": mla.heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope,
        "qk_pos_emb_head_dim": mla.rope,
        "v_head_dim": mla.v,
        "qk_layernorm": mla.latent_norm,
        "window_size": None if mla.window is None else (mla.window - 1, 0),
        "softmax_type": "learnable" if mla.sinks else "vanilla",
        "rope_type": mla.rope_type,
        "rotary_base": mla.rotary_base,
        "rotary_scaling_factor": mla.scaling_factor,
        "original_max_position_embeddings": mla.original_context,
        "beta_fast": mla.beta_fast,
        "beta_slow": mla.beta_slow,
        "mscale": mla.mscale,
        "mscale_all_dim": mla.mscale_all_dim,
        "layernorm_epsilon": 1e-5,
        # An integer N: every N-th layer has its rope channels as they are.
        "no_rope_freq": None if mla.rotated else 1,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        **_host_fields(),
        **changes,
    }
    heterogeneous = "per_layer_config" in changes
    return (HeterogeneousMLAConfig if heterogeneous else MLATransformerConfig)(**fields)


def _host_fields() -> dict[str, object]:
    """Fields that all test configs share; fusions that need a GPU are off."""
    return {
        "transformer_impl": "local",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # The same weights at every tensor-parallel size, also on a GPU.
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }
