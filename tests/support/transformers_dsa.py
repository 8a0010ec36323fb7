"""Small models of transformers with sparse attention: DeepSeek-V3.2 and GLM-5."""

from dataclasses import replace

from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

from tests.oracle import OracleMLA
from tests.oracle_dsa import OracleDSA

VOCABULARY = 64
MLA = OracleMLA(hidden=32, heads=4, q_lora_rank=16, kv_lora_rank=24, nope=12, rope=8, v=20)
YARN = {
    "rope_type": "yarn",
    "rotary_base": 100.0,
    "scaling_factor": 40.0,
    "original_context": 64,
    "beta_fast": 8.0,
    "mscale_all_dim": 0.707,
}
DEEPSEEK = OracleDSA(mla=replace(MLA, **YARN), heads=16, width=16, topk=6, hadamard=False)
GLM = replace(DEEPSEEK, mla=MLA, interleaved=True)


def model_of(dsa: OracleDSA, glm: bool, **changes):
    """A model of transformers with such layers, in float64."""
    mla = dsa.mla
    rope = {"rope_type": "default", "rope_theta": mla.rotary_base}
    if mla.rope_type == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": mla.scaling_factor,
            "original_max_position_embeddings": mla.original_context,
            "beta_fast": mla.beta_fast,
            "beta_slow": mla.beta_slow,
            "mscale": mla.mscale,
            "mscale_all_dim": mla.mscale_all_dim,
        }
    config, model = DeepseekV32Config, DeepseekV32ForCausalLM
    if glm:
        config, model = GlmMoeDsaConfig, GlmMoeDsaForCausalLM
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": mla.hidden,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 99,
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.nope,
        "qk_rope_head_dim": mla.rope,
        "v_head_dim": mla.v,
        "index_topk": dsa.topk,
        "index_head_dim": dsa.width,
        "index_n_heads": dsa.heads,
        "rope_parameters": rope,
        "max_position_embeddings": 4096,
        **changes,
    }
    return model(config(**fields, attn_implementation="eager")).double().eval()
