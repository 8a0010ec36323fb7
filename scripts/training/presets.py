"""Released MLA models as Megatron's arguments, and smaller models of the same structure."""

from __future__ import annotations

Model = dict[str, object]

# The arguments that describe a model, under Megatron's names, with the values of those that a
# preset leaves out. ``latent_norm_epsilon``, of the norms inside the attention,
# ``llama_4_scaling_beta``, ``post_mlp_layernorm`` and two of the router are options of the layers
# (AbsorbedMLAOptions). Megatron has none for YaRN's ``original_max_position_embeddings`` and betas.
COMMON: Model = {
    "vocab_size": None,
    "num_layers": None,
    "hidden_size": None,
    "ffn_hidden_size": None,
    "num_attention_heads": None,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "layernorm_epsilon": 1e-6,
    "latent_norm_epsilon": 1e-6,
    "max_position_embeddings": 163840,
    "rope_type": "yarn",
    "rotary_base": 10000,
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": None,
    "num_experts": None,
    "moe_layer_freq": [],  # for each layer 0 (dense) or 1 (MoE)
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_topk": None,
    "moe_router_norm_topk_prob": None,
    "post_mlp_layernorm": False,
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 1e-4,
    "experimental_attention_variant": None,
    "dsa_indexer_n_heads": None,
    "dsa_indexer_head_dim": None,
    "dsa_indexer_topk": None,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 1,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_rotate_activation": True,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": None,
}
INDEXER = tuple(n for n in COMMON if n.startswith(("dsa_", "experimental_attention_variant")))


def _moe(dense: int, layers: int) -> list[int]:
    return [0] * dense + [1] * (layers - dense)


def _set(**values: object) -> Model:
    return values


def _sizes(vocabulary: int, layers: int, hidden: int, ffn: int, heads: int, dense: int) -> Model:
    """Of a model whose first layers are ``dense``."""
    names = ("vocab_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
    sizes = dict(zip(names, (vocabulary, layers, hidden, ffn, heads)))
    return {**sizes, "moe_layer_freq": _moe(dense, layers)}


def _experts(experts: int, topk: int, width: int, shared: int) -> Model:
    """Of so many experts and shared ones, each of this width."""
    names = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size")
    total = "moe_shared_expert_intermediate_size"
    return {**dict(zip(names, (experts, topk, width))), total: shared * width}


def _yarn(factor: float, mscale: float = 1.0, beta_fast: float = 32.0) -> Model:
    scales = {"mscale": mscale, "mscale_all_dim": mscale}
    return {"rotary_scaling_factor": factor, "beta_fast": beta_fast, **scales}


_NO_YARN: Model = {"rope_type": "rope"}
_V2_ROUTER: Model = {
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_aux_loss_coeff": 1e-3,
}
_V3: Model = {
    **_sizes(129280, 61, 7168, 18432, 128, dense=3),
    **_experts(256, 8, 2048, shared=1),
    **_yarn(40.0),
    "q_lora_rank": 1536,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
}
_INDEXER: Model = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "dsa_indexer_k_norm_epsilon": 1e-6,
}
_PRESETS: dict[str, Model] = {
    # Not a released model, but one with all of their parts that is small enough for a CPU.
    "tiny": {
        **_sizes(320, 3, 128, 384, 4, dense=2),
        **_experts(4, 2, 128, shared=1),
        **_set(q_lora_rank=64, kv_lora_rank=32),
        **_set(qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32),
        "max_position_embeddings": 4096,
        **_NO_YARN,
    },
    # deepseek-ai/DeepSeek-V2-Lite (arXiv:2405.04434, appendix B), 16B parameters, 2.4B active.
    "deepseek-v2-lite": {
        **_sizes(102400, 27, 2048, 10944, 16, dense=1),
        **_experts(64, 6, 1408, shared=2),
        **_yarn(40.0, mscale=0.707),
        **_V2_ROUTER,
    },
    # deepseek-ai/DeepSeek-V3 (arXiv:2412.19437, section 4.2), 671B parameters, 37B active; without
    # the multi-token-prediction layer, as the next two.
    "deepseek-v3": _V3,
    # deepseek-ai/DeepSeek-V3.2 (arXiv:2512.02556): an indexer in every layer.
    "deepseek-v3.2": {**_V3, **_INDEXER},
    # zai-org/GLM-5, 744B parameters, 40B active.
    "glm-5": {
        **_sizes(154880, 78, 6144, 12288, 64, dense=3),
        **_experts(256, 8, 2048, shared=1),
        **_set(q_lora_rank=2048, qk_head_dim=192, v_head_dim=256),
        **_set(layernorm_epsilon=1e-5, max_position_embeddings=202752, rotary_base=1000000),
        **_NO_YARN,
        **_INDEXER,
        **_set(moe_router_topk_scaling_factor=2.5, dsa_indexer_n_heads=32),
        **_set(dsa_indexer_rope_interleaved=True, dsa_indexer_rotate_activation=False),
    },
    # moonshotai/Kimi-K2-Base (arXiv:2507.20534), first release, 1T parameters, 32B active.
    "kimi-k2": {
        **_sizes(163840, 61, 7168, 18432, 64, dense=1),
        **_experts(384, 8, 2048, shared=1),
        **_yarn(32.0, beta_fast=1.0),
        **_set(q_lora_rank=1536, max_position_embeddings=131072, rotary_base=50000),
        "moe_router_topk_scaling_factor": 2.827,
    },
    # moonshotai/Moonlight-16B-A3B (arXiv:2502.16982), 16B parameters, 3B active.
    "moonlight": {
        **_sizes(163840, 27, 2048, 11264, 16, dense=1),
        **_experts(64, 6, 1408, shared=2),
        **_set(layernorm_epsilon=1e-5, max_position_embeddings=8192, rotary_base=50000),
        **_NO_YARN,
        "moe_router_topk_scaling_factor": 2.446,
    },
}
PRESETS = tuple(_PRESETS)


def get_preset(name: str) -> Model:
    """The preset called ``name``, complete.

    Raises:
        ValueError: If there is none.
    """
    if name not in _PRESETS:
        raise ValueError(f"--preset must be one of {', '.join(PRESETS)}; got {name!r}")
    return {**COMMON, **_PRESETS[name]}


def scale_down(model: Model, factor: int) -> Model:
    """A model of the same structure with widths, layers and experts divided by ``factor``.

    Query compression, the ratio of a head's nope, rope and value widths, the order of dense and MoE
    layers, shared experts and routing scores stay. Head widths are divided by at most 4, so that
    RoPE has enough frequencies; at least 4 heads are left, so that ranks can share them. An indexer
    has a power of two as its head width, as its Hadamard transform needs.

    Args:
        model: A preset.
        factor: At least 1; 1 returns the model unchanged.

    Raises:
        ValueError: If ``factor`` is below 1.
    """
    if factor < 1:
        raise ValueError(f"--scale-down must be at least 1, got {factor}")
    if factor == 1:
        return model
    heads = min(factor, 4)
    small = {**model, **{name: _shrunk(model[name], factor, n) for name, n in _MULTIPLES.items()}}
    dense = max(1, round(model["moe_layer_freq"].count(0) / factor))
    layers = max(dense + 1, round(model["num_layers"] / factor))
    rope, indexer = model["qk_pos_emb_head_dim"], model["dsa_indexer_head_dim"]
    # Routing groups limit the nodes that a token is sent to; a small model fits on one node.
    groups = ("num_groups", "group_topk", "group_score_topk")
    return {
        **small,
        **{f"moe_router_{name}": None for name in groups},
        "num_layers": layers,
        "moe_layer_freq": _moe(dense, layers),
        "qk_head_dim": model["qk_head_dim"] // heads,
        "qk_pos_emb_head_dim": max(2, rope // heads // 2 * 2),
        "v_head_dim": model["v_head_dim"] // heads,
        "moe_router_topk": min(model["moe_router_topk"], max(1, small["num_experts"] // 2)),
        "dsa_indexer_head_dim": indexer and 1 << ((indexer // heads).bit_length() - 1),
    }


# What scale_down leaves these sizes a multiple of.
_MULTIPLES = {
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_topk": 16,
}


def _shrunk(value: int | None, factor: int, multiple: int) -> int | None:
    if value is None:
        return None
    return min(value, max(multiple, round(value / factor / multiple) * multiple))
