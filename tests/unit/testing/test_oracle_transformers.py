"""The oracle's gates, scaled queries and channels that stay, against attentions of transformers."""

import importlib
from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.oracle import OracleMLA
from tests.support.cases import TINY, random_weights
from tests.support.standard import interleave_heads

# Epsilon 1e-6 of the latents' norms is transformers' own, but for dots3.
PLAIN = replace(TINY, norm_eps=1e-6, rope_type="rope", scaling_factor=1.0, mscale_all_dim=0.0)
DOTS = replace(PLAIN, norm_eps=1e-5, gate="headwise", k_rope_norm=True)
SCALED = replace(PLAIN, query_scaling_beta=0.1, original_context=3)
LENGTH = 13
NAMES = {
    "w_q": "q_proj",
    "w_dq": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "w_uq": "q_b_proj",
    "w_dkv": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "k_rope_norm": "k_rope_only_layernorm",
    "w_gate": "g_proj",
    "w_o": "o_proj",
}
ROPE = {"rope_type": "default", "rope_theta": PLAIN.rotary_base}
LLAMA_4 = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 3}
# Folder and prefix of classes in transformers, layer, and fields of the config.
CASES = {
    "bailing_hybrid": ("BailingHybrid", replace(PLAIN, gate="headwise"), {}),
    "dots3_note": ("Dots3NoteText", DOTS, {"layer_types": ["full_attention"], "use_dsa": False}),
    "kimi_linear": ("KimiLinear", replace(PLAIN, q_lora_rank=None, rotated=False), {}),
    "mistral4": ("Mistral4", SCALED, {"rope_parameters": ROPE | LLAMA_4}),
}


def attention_of(folder: str, prefix: str, mla: OracleMLA, **fields):
    parts = (
        f"transformers.models.{folder}.{kind}_{folder}" for kind in ("configuration", "modeling")
    )
    configs, models = map(importlib.import_module, parts)
    sizes = {"hidden_size": mla.hidden, "q_lora_rank": mla.q_lora_rank, "v_head_dim": mla.v}
    sizes |= {"qk_nope_head_dim": mla.nope, "qk_rope_head_dim": mla.rope}
    sizes |= {"kv_lora_rank": mla.kv_lora_rank, "num_attention_heads": mla.heads}
    sizes["num_key_value_heads"] = mla.heads
    config = getattr(configs, f"{prefix}Config")(num_hidden_layers=1, **sizes, **fields)
    config._attn_implementation = "eager"
    return getattr(models, f"{prefix}Attention")(config, layer_idx=0).double()


@pytest.mark.parametrize("folder", CASES)
def test_equals(folder):
    prefix, mla, fields = CASES[folder]
    attention, weights = attention_of(folder, prefix, mla, **fields), random_weights(mla)
    state = {f"{NAMES[name]}.weight": w for name, w in weights.items() if name in NAMES}
    state["kv_b_proj.weight"] = interleave_heads(mla, weights["w_uk"], weights["w_uv"])
    # A factor of a latent behind its norm is one of the norm's weights.
    for latent in ("q", "kv"):
        norm, scale = f"{latent}_a_layernorm.weight", getattr(attention, f"{latent}_lora_scale", 1)
        if norm in state:
            state[norm] = state[norm] / scale
    attention.load_state_dict(state)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, mla.hidden, generator=generator, dtype=torch.float64)
    cos, sin = (torch.cat((t, t), -1)[None] for t in mla.rotary_table(LENGTH))
    hidden = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    more = {"position_embeddings": (cos, sin)} if mla.rotated else {}
    if mla.query_scaling_beta:
        more["position_ids"] = torch.arange(LENGTH)[None]
    found, _ = attention(x[None], attention_mask=hidden[None, None], **more)
    expected = oracle.forward(mla, weights, x, oracle.batch(LENGTH, 1))
    # transformers computes norms, and some gates, in fp32.
    torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-6)
