"""Sizes of released MLA models, and smaller models of the same structure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """The sizes of a decoder-only MLA model, under the names of Megatron's config.

    Attributes:
        q_lora_rank: None if queries are not compressed.
        num_moe_experts: None for a model without MoE layers.
        moe_layer_freq: For each layer 0 (dense) or 1 (MoE).
        moe_shared_expert_intermediate_size: Total width of the shared experts; None without them.
        latent_norm_eps: Epsilon of the norms inside the attention, which is 1e-6 in Hugging Face's
            models whatever ``layernorm_epsilon`` is.
        moe_router_group_score_topk: Option of the layers, as is the next; None: Megatron's choice.
        experimental_attention_variant: ``"dsa"`` for sparse attention, with an indexer of the
            ``dsa_indexer_*`` fields; None for dense attention.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    layernorm_epsilon: float = 1e-6
    latent_norm_eps: float = 1e-6
    max_position_embeddings: int = 163840
    rope_type: str = "yarn"
    rotary_base: float = 10000.0
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0
    num_moe_experts: int | None = None
    moe_layer_freq: tuple[int, ...] = ()
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: str = "sigmoid"
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score_topk: int | None = None
    moe_router_norm_topk_prob: bool | None = None
    moe_router_enable_expert_bias: bool = True
    moe_aux_loss_coeff: float = 1e-4
    experimental_attention_variant: str | None = None
    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_topk_freq: int = 1
    dsa_indexer_skip_topk_offset: int = 1
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_rotate_activation: bool = True
    dsa_indexer_scoring_relu: bool = True
    dsa_indexer_k_norm_epsilon: float | None = None

    def replace(self, **changes) -> ModelPreset:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def _dense_then_moe(dense: int, layers: int) -> tuple[int, ...]:
    return (0,) * dense + (1,) * (layers - dense)


# deepseek-ai/DeepSeek-V3 (arXiv:2412.19437, section 4.2), 671B parameters, 37B active; without
# the multi-token-prediction layer.
_DEEPSEEK_V3 = ModelPreset(
    vocab_size=129280,
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    q_lora_rank=1536,
    rotary_scaling_factor=40.0,
    num_moe_experts=256,
    moe_layer_freq=_dense_then_moe(3, 61),
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    moe_router_topk=8,
    moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=8,
    moe_router_group_topk=4,
)

PRESETS = {
    # Not a released model, but one with all of their parts that is small enough for a CPU.
    "tiny": ModelPreset(
        vocab_size=320,
        num_layers=3,
        hidden_size=128,
        ffn_hidden_size=384,
        num_attention_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_head_dim=32,
        qk_pos_emb_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=4096,
        rope_type="rope",
        num_moe_experts=4,
        moe_layer_freq=_dense_then_moe(2, 3),
        moe_ffn_hidden_size=128,
        moe_shared_expert_intermediate_size=128,
        moe_router_topk=2,
    ),
    # deepseek-ai/DeepSeek-V2-Lite (arXiv:2405.04434, appendix B), 16B parameters, 2.4B active.
    "deepseek-v2-lite": ModelPreset(
        vocab_size=102400,
        num_layers=27,
        hidden_size=2048,
        ffn_hidden_size=10944,
        num_attention_heads=16,
        q_lora_rank=None,
        rotary_scaling_factor=40.0,
        mscale=0.707,
        mscale_all_dim=0.707,
        num_moe_experts=64,
        moe_layer_freq=_dense_then_moe(1, 27),
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_router_topk=6,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_aux_loss_coeff=1e-3,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    # deepseek-ai/DeepSeek-V3.2 (arXiv:2512.02556): DeepSeek-V3's sizes and an indexer in every
    # layer; without the multi-token-prediction layer.
    "deepseek-v3.2": _DEEPSEEK_V3.replace(
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=64,
        dsa_indexer_head_dim=128,
        dsa_indexer_topk=2048,
        dsa_indexer_k_norm_epsilon=1e-6,
    ),
    # zai-org/GLM-5, 744B parameters, 40B active; without the multi-token-prediction layer.
    "glm-5": ModelPreset(
        vocab_size=154880,
        num_layers=78,
        hidden_size=6144,
        ffn_hidden_size=12288,
        num_attention_heads=64,
        q_lora_rank=2048,
        qk_head_dim=192,
        v_head_dim=256,
        layernorm_epsilon=1e-5,
        max_position_embeddings=202752,
        rope_type="rope",
        rotary_base=1000000.0,
        num_moe_experts=256,
        moe_layer_freq=_dense_then_moe(3, 78),
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_router_topk=8,
        moe_router_topk_scaling_factor=2.5,
        experimental_attention_variant="dsa",
        dsa_indexer_n_heads=32,
        dsa_indexer_head_dim=128,
        dsa_indexer_topk=2048,
        dsa_indexer_rope_interleaved=True,
        dsa_indexer_rotate_activation=False,
        dsa_indexer_k_norm_epsilon=1e-6,
    ),
    # moonshotai/Kimi-K2-Base (arXiv:2507.20534), first release, 1T parameters, 32B active.
    "kimi-k2": ModelPreset(
        vocab_size=163840,
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=64,
        q_lora_rank=1536,
        max_position_embeddings=131072,
        rotary_base=50000.0,
        rotary_scaling_factor=32.0,
        beta_fast=1.0,
        num_moe_experts=384,
        moe_layer_freq=_dense_then_moe(1, 61),
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_router_topk=8,
        moe_router_topk_scaling_factor=2.827,
    ),
    # moonshotai/Moonlight-16B-A3B (arXiv:2502.16982), 16B parameters, 3B active.
    "moonlight": ModelPreset(
        vocab_size=163840,
        num_layers=27,
        hidden_size=2048,
        ffn_hidden_size=11264,
        num_attention_heads=16,
        q_lora_rank=None,
        layernorm_epsilon=1e-5,
        max_position_embeddings=8192,
        rope_type="rope",
        rotary_base=50000.0,
        num_moe_experts=64,
        moe_layer_freq=_dense_then_moe(1, 27),
        moe_ffn_hidden_size=1408,
        moe_shared_expert_intermediate_size=2 * 1408,
        moe_router_topk=6,
        moe_router_topk_scaling_factor=2.446,
    ),
}


def get_preset(name: str) -> ModelPreset:
    """The preset called ``name``.

    Raises:
        ValueError: If there is none.
    """
    if name not in PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return PRESETS[name]


def scale_down(preset: ModelPreset, factor: int) -> ModelPreset:
    """A model of the same structure with widths, layers and experts divided by ``factor``.

    Query compression, the ratio of a head's nope, rope and value widths, the order of dense and MoE
    layers, shared experts and routing scores stay. Head widths are divided by at most 4, so that
    RoPE has enough frequencies; at least 4 heads are left, so that ranks can share them. An indexer
    has a power of two as its head width, as its Hadamard transform needs.

    Args:
        preset: The model.
        factor: At least 1; 1 returns the model unchanged.

    Raises:
        ValueError: If ``factor`` is below 1.
    """
    if factor < 1:
        raise ValueError(f"--scale-down must be at least 1, got {factor}")
    if factor == 1:
        return preset

    def shrink(value: int | None, multiple: int) -> int | None:
        if value is None:
            return None
        return min(value, max(multiple, round(value / factor / multiple) * multiple))

    head_factor = min(factor, 4)
    dense = max(1, round(preset.moe_layer_freq.count(0) / factor))
    layers = max(dense + 1, round(preset.num_layers / factor))
    experts = shrink(preset.num_moe_experts, 4)
    return preset.replace(
        num_layers=layers,
        hidden_size=shrink(preset.hidden_size, 64),
        ffn_hidden_size=shrink(preset.ffn_hidden_size, 64),
        num_attention_heads=shrink(preset.num_attention_heads, 4),
        q_lora_rank=shrink(preset.q_lora_rank, 16),
        kv_lora_rank=shrink(preset.kv_lora_rank, 16),
        qk_head_dim=preset.qk_head_dim // head_factor,
        qk_pos_emb_head_dim=max(2, preset.qk_pos_emb_head_dim // head_factor // 2 * 2),
        v_head_dim=preset.v_head_dim // head_factor,
        num_moe_experts=experts,
        moe_layer_freq=_dense_then_moe(dense, layers),
        moe_ffn_hidden_size=shrink(preset.moe_ffn_hidden_size, 32),
        moe_shared_expert_intermediate_size=shrink(preset.moe_shared_expert_intermediate_size, 32),
        moe_router_topk=min(preset.moe_router_topk, max(1, (experts or 0) // 2)),
        # Routing groups limit the nodes that a token is sent to; a small model fits on one node.
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_group_score_topk=None,
        dsa_indexer_n_heads=shrink(preset.dsa_indexer_n_heads, 4),
        dsa_indexer_head_dim=_power_of_two(preset.dsa_indexer_head_dim, head_factor),
        dsa_indexer_topk=shrink(preset.dsa_indexer_topk, 16),
    )


def _power_of_two(width: int | None, factor: int) -> int | None:
    """The largest power of two that is at most ``width / factor``."""
    return None if width is None else 1 << ((width // factor).bit_length() - 1)
