"""Configs of models with an indexer: what is read, what is refused, and Megatron's words for it."""

from __future__ import annotations

import pytest
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from transformers import GlmMoeDsaConfig

from checkpoint_conversion.indexer import Indexer, schedule_of
from checkpoint_conversion.megatron_args import from_megatron_args, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from tests.conversion.released import DEEPSEEK_V32, GLM_5, GLM_52
from tests.conversion.support import CONFIGS, GLM5, SHARED, V32, hugging_face_config, tiny_config
from tests.support.refusal import refusal


def test_released_models():
    v32, glm5, glm52 = map(ModelConfig.from_hugging_face, (DEEPSEEK_V32, GLM_5, GLM_52))
    assert v32.indexer == Indexer(heads=64, width=128, topk=2048)
    assert (v32.mtp_layers, v32.fp8_scales) == (1, "ue8m0")
    assert glm5.indexer == Indexer(heads=32, width=128, topk=2048)
    assert (glm5.qk_nope_head_dim, glm5.v_head_dim, glm5.q_lora_rank) == (192, 256, 2048)
    assert sum(map(glm52.indexer.selects, range(78))) == 21
    back = from_megatron_args(to_megatron_args(glm52))
    assert back == glm52
    for name in ("indexer_types", "index_topk_freq", "index_skip_topk_offset"):
        assert back.hugging_face[name] == GLM_52[name]


@pytest.mark.parametrize("freq", [1, 2, 4])
@pytest.mark.parametrize("offset", [1, 2, 3, 9])
def test_layers_with_an_indexer(freq, offset):
    """The same ones in transformers, here and in Megatron, however config.json says it."""
    numbers = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    types = GlmMoeDsaConfig(num_hidden_layers=9, **numbers).indexer_types
    base = {**GLM5, "num_hidden_layers": 9}
    pattern = "".join({"full": "F", "shared": "S"}[kind] for kind in types)
    for fields in (numbers, {"indexer_types": types}, {"index_topk_pattern": pattern}):
        config = tiny_config(**base, **fields)
        found = [config.indexer.selects(layer) for layer in range(9)]
        assert found == [kind == "full" for kind in types]
        args = to_megatron_args(config)
        assert found == [
            not is_dsa_skip_topk_layer(
                layer + 1, args.dsa_indexer_skip_topk_offset, args.dsa_indexer_topk_freq
            )
            for layer in range(9)
        ]
        assert from_megatron_args(args) == config


def test_types_take_precedence():
    """As in transformers."""
    fields = {**SHARED, "index_topk_freq": 1}
    assert tiny_config(**fields).indexer == tiny_config(**SHARED).indexer


def test_patterns_that_no_numbers_describe():
    assert schedule_of([True, False, True, True, False]) is None
    assert schedule_of([False, True]) is None
    assert schedule_of([True, True, False]) == (2, 2)


def test_experts_in_every_other_layer():
    """Which layers have experts, for models of transformers that do not read moe_layer_freq."""
    config = tiny_config(**{**SHARED, "moe_layer_freq": 2})
    back = from_megatron_args(to_megatron_args(config))
    assert back == config
    kinds = ["sparse" if moe else "dense" for moe in config.moe_layers]
    assert back.hugging_face["mlp_layer_types"] == kinds


@pytest.mark.parametrize("name", ["v32", "glm5", "shared"])
def test_another_model_with_the_same_fields(name):
    fields = {**CONFIGS[name], "model_type": "deepseek_v3", "indexer_types": None}
    fields["architectures"] = ["DeepseekV3ForCausalLM"]
    with refusal("index_topk must be left out: sparse attention is that of deepseek_v32"):
        tiny_config(**fields)


_MIXED = ["full", "shared", "full"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**V32, "index_topk": None}, "index_topk is missing"),
        ({**V32, "index_n_heads": 0}, "index_n_heads must be an integer from 1"),
        ({**V32, "index_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim 8"),
        ({**V32, "q_lora_rank": None}, "q_lora_rank must be an integer: the indexer reads"),
        ({**V32, "indexer_rope_interleave": True}, "must be false in deepseek_v32, got True"),
        ({**GLM5, "indexer_rope_interleave": False}, "must be true in glm_moe_dsa, got False"),
        ({**V32, "indexer_types": _MIXED}, "every layer of a deepseek_v32 has an indexer"),
        ({**V32, "index_topk_freq": 2}, "every layer of a deepseek_v32 has an indexer"),
        ({**GLM5, "indexer_types": ["full"]}, "indexer_types must be a list of 3, each 'full'"),
        ({**GLM5, "indexer_types": ["full", {}, 3]}, "indexer_types must be a list of 3"),
        ({**GLM5, "indexer_types": ["shared", "full", "full"]}, "some first layers with an index"),
        ({**GLM5, "index_topk_pattern": "SFF"}, "index_topk_pattern must be some first layers"),
        ({**GLM5, "index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_topk_freq must be"),
        ({**GLM5, "scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({**V32, "mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 3"),
        ({**V32, "architectures": ["GlmMoeDsaForCausalLM"]}, "architectures must be"),
        ({**V32, "attention_bias": True}, "attention_bias must be False"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_unusual_values_are_refused(fields, message):
    with refusal(message):
        ModelConfig.from_hugging_face(hugging_face_config(**fields))
