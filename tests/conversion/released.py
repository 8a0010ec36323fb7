"""What decides the function of released models, as their config.json says it."""

# fmt: off
_COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True,
}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
_LARGE = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "q_lora_rank": 1536,
}
_SMALL = {
    "hidden_size": 2048, "moe_intermediate_size": 1408, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 27, "first_k_dense_replace": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1, "q_lora_rank": None,
}
# fmt: on


def _yarn(factor: float, mscale: float, beta_fast: float) -> dict:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


# fmt: off
DEEPSEEK_V3 = {
    **_COMMON,
    **_LARGE,
    **_SIGMOID,
    "model_type": "deepseek_v3", "vocab_size": 129280, "num_attention_heads": 128,
    "num_key_value_heads": 128, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "rope_theta": 10000,
    "rope_scaling": _yarn(40, 1.0, 32),
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
KIMI_K2 = {
    **_COMMON,
    **_LARGE,
    **_SIGMOID,
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
    "num_key_value_heads": 64, "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": _yarn(32.0, 1.0, 1.0),
}
DEEPSEEK_V2_LITE = {
    **_COMMON,
    **_SMALL,
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "intermediate_size": 10944, "scoring_func": "softmax", "topk_method": "greedy",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": _yarn(40, 0.707, 32),
}
MOONLIGHT = {
    **_COMMON,
    **_SMALL,
    **_SIGMOID,
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 163840,
    "intermediate_size": 11264, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "rope_scaling": None,
}
_SPARSE = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    **_SPARSE,
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "quantization_config": {**DEEPSEEK_V3["quantization_config"], "scale_fmt": "ue8m0"},
}
# With transformers 4's fields of the rotary embedding, as in the others.
GLM_5 = {
    **_COMMON,
    **_SIGMOID,
    **_SPARSE,
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880,
    "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 78, "first_k_dense_replace": 3, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32,
    "indexer_rope_interleave": True, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "rope_scaling": None,
}
# 21 layers with an indexer, 57 without.
GLM_52 = {
    **GLM_5,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1048576,
    "rope_theta": 8000000,
}
# fmt: on


# By the names of scripts/training/presets.py.
RELEASED = {
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm-5": GLM_5,
    "kimi-k2": KIMI_K2,
    "moonlight": MOONLIGHT,
}
