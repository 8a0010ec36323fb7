"""Models as Megatron's arguments and back: nothing that decides the function may get lost."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.dims import MLADims, softmax_scale
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.megatron_args import from_megatron_args, to_megatron_args
from checkpoint_conversion.model import ModelConfig, read_function
from checkpoint_conversion.routing import ROUTER_OPTIONS
from tests.conversion.released import DEEPSEEK_V3, RELEASED
from tests.conversion.support import (
    CONFIGS,
    MINICPM3,
    MISTRAL4,
    random_tensors,
    refused,
    tiny_config,
    write_hugging_face,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training.presets import COMMON, INDEXER, get_preset

# Arguments of Megatron-LM that are no fields of its model's config.
_COMMAND_LINE_ONLY = """
swiglu apply_layernorm_1p squared_relu group_query_attention position_embedding_type
add_position_embedding use_rotary_position_embeddings norm_epsilon latent_norm_epsilon vocab_size
padded_vocab_size max_position_embeddings untie_embeddings_and_output_weights num_experts
llama_4_scaling_beta rope_factors post_mlp_layernorm
"""
# Of config.json, what says nothing about the model, or is compared in another way.
_NOT_COMPARED = """
architectures model_type attention_dropout initializer_range use_cache quantization_config
rope_scaling
"""
_DSA = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": 6,
}
_SMALL = {
    **CONFIGS,
    "mistral4": MISTRAL4,
    "mistral4 dense": {**MISTRAL4, "first_k_dense_replace": 3},
    "mistral4 not normalised": {**MISTRAL4, "norm_topk_prob": False},
    "minicpm3": MINICPM3,
}
_SCALES = {
    "deepseek-v2-lite": 0.1147214,
    "deepseek-v3": 0.1352338,
    "deepseek-v3.2": 0.1352338,
    "glm-5": 0.0625,
    "kimi-k2": 0.1308608,
    "moonlight": 0.0721688,
}


def _released(name: str) -> ModelConfig:
    return ModelConfig.from_hugging_face(RELEASED[name])


def _args(**changes) -> Namespace:
    """Arguments of a tiny DeepSeek-V3, some of them changed, or left out where ``...``."""
    values = {**vars(to_megatron_args(tiny_config())), **changes}
    return Namespace(**{k: v for k, v in values.items() if v is not ...})


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_survive(name):
    config = _released(name)
    back = from_megatron_args(to_megatron_args(config))
    for field in set(config.hugging_face) - set(_NOT_COMPARED.split()):
        assert back.hugging_face[field] == config.hugging_face[field], field
    old, new = config.hugging_face["rope_scaling"], back.hugging_face["rope_scaling"]
    assert new == (old and {**old, "rope_type": "yarn"})
    assert dataclasses.replace(back, model_type=config.model_type) == config
    assert to_megatron_args(back) == to_megatron_args(config)


@pytest.mark.parametrize("name", _SMALL)
def test_small_models_survive(name):
    config = tiny_config(**_SMALL[name])
    args = to_megatron_args(config)
    back = from_megatron_args(vars(args))
    assert back == config and to_megatron_args(back) == args


@pytest.mark.parametrize("name", RELEASED)
def test_arguments_agree_with_the_presets(name):
    args, preset = to_megatron_args(_released(name)), get_preset(name)
    for name, value in preset.items():
        if name in ("latent_norm_epsilon", "moe_aux_loss_coeff"):
            continue  # a note says the one, the other is for training only
        if name in INDEXER and value == COMMON[name]:
            assert getattr(args, name, value) == value
            continue
        if name == "moe_router_topk_scaling_factor":
            value = value or 1.0
        assert getattr(args, name) == value, name


@pytest.mark.parametrize("name", RELEASED)
def test_megatron_builds_its_config_from_them(name):
    args = vars(to_megatron_args(_released(name)))
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert set(args) - fields == {*_COMMAND_LINE_ONLY.split(), *ROUTER_OPTIONS}
    known = {k: v for k, v in args.items() if k in fields}
    config = MLATransformerConfig(**known, num_moe_experts=args["num_experts"])
    scale = softmax_scale(config, MLADims.from_config(config, 1))
    assert scale == pytest.approx(_SCALES[name], rel=1e-6)


def test_parallel_sizes_dtype_and_padding():
    args = to_megatron_args(
        tiny_config(), tensor_parallel=4, dtype=torch.float16, padded_vocab_size=128
    )
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (4, 1)
    assert (args.params_dtype, args.fp16, args.bf16) == (torch.float16, True, False)
    assert (args.vocab_size, args.padded_vocab_size) == (64, 128)
    assert from_megatron_args(args).dtype == torch.float16


def test_torch_loads_them_when_namespaces_are_allowed():
    args = to_megatron_args(_released("deepseek-v3"))
    file = io.BytesIO()
    torch.save(args, file)
    file.seek(0)
    # For good: leaving torch's safe_globals() would take it from Megatron, which allows it, too.
    torch.serialization.add_safe_globals([Namespace])
    assert torch.load(file, weights_only=True) == args


@pytest.mark.parametrize("name", [*_SMALL, "moonlight"])
def test_transformers_loads_the_config_json(name):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = tiny_config(**_SMALL[name]) if name in _SMALL else _released(name)
    raw = from_megatron_args(to_megatron_args(config)).hugging_face
    loaded = auto.CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    assert loaded.num_hidden_layers == config.num_layers
    kinds = getattr(loaded, "mlp_layer_types", None)
    first = getattr(loaded, "first_k_dense_replace", config.num_layers)
    dense = kinds.count("dense") if kinds else first
    assert dense == config.moe_layers.count(False)
    rotary, found = read_function(config.fields, config).rotary, loaded.rope_parameters
    plain = "default" if rotary.rope_factors is None else "longrope"
    assert found["rope_type"] == ("yarn" if rotary.rope_type == "yarn" else plain)
    assert tuple(found.get("short_factor", ())) == (rotary.rope_factors or ())
    assert found["rope_theta"] == rotary.rotary_base
    assert found.get("llama_4_scaling_beta") == rotary.llama_4_scaling_beta


def test_a_vocabulary_that_a_tokenizer_enlarged_is_not_cut():
    """Megatron's --vocab-size is without the tokenizer's own tokens; the rows have them."""
    args = _args(vocab_size=60, padded_vocab_size=128, tokenizer_type="NullTokenizer")
    assert from_megatron_args(args).vocab_size == 128
    assert from_megatron_args(_args(vocab_size=None, padded_vocab_size=128)).vocab_size == 128


@pytest.mark.parametrize(
    ("freq", "first", "every"),
    [
        ([0, 1, 1], 1, 1),
        ((1, 1, 1), 0, 1),
        ("([0]*1+[1]*2)", 1, 1),
        ("[0,0,1]", 2, 1),
        (1, 0, 1),
        (2, 0, 2),
        (3, 0, 3),
        ([0, 0, 0], 3, 1),
    ],
)
def test_patterns_of_layers(freq, first, every):
    config = from_megatron_args(_args(moe_layer_freq=freq))
    raw = config.hugging_face
    assert (raw["first_k_dense_replace"], raw["moe_layer_freq"]) == (first, every)


@pytest.mark.parametrize(
    "freq",
    [
        *("__import__('os')", "[0]*10**9", "[1]*20000", "([0]*9999)*9999*9999"),
        *("(" * 9000, "[0]+" * 2400 + "[0]"),
    ],
)
def test_hostile_patterns(freq):
    with refused("--moe-layer-freq must be"):
        from_megatron_args(_args(moe_layer_freq=freq))


_SOFTMAX = {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
_NO_GROUPS = {"moe_router_num_groups": None, "moe_router_group_topk": None}
_PLAIN_DENSE = {"num_experts": None, "rope_type": "rope", "mscale_all_dim": 0.0}
_REFUSED = [
    ({"multi_latent_attention": False}, "args.multi_latent_attention must be True, got False"),
    ({"multi_latent_attention": ...}, "args.multi_latent_attention is missing"),
    ({"swiglu": False}, "args.swiglu must be True"),
    ({"normalization": "LayerNorm"}, "args.normalization must be 'RMSNorm', got 'LayerNorm'"),
    ({"add_bias_linear": True}, "args.add_bias_linear must be False"),
    ({"qk_layernorm": False}, "args.qk_layernorm must be True"),
    ({"layernorm_zero_centered_gamma": True}, "args.layernorm_zero_centered_gamma must be False"),
    ({"moe_latent_size": 8}, "args.moe_latent_size must be None, got 8"),
    (
        {"experimental_attention_variant": "gated"},
        "experimental_attention_variant must be None or 'dsa'",
    ),
    ({**_DSA, "dsa_indexer_topk": None}, "dsa_indexer_topk is missing"),
    ({**_DSA, "dsa_indexer_rope_interleaved": 1}, "dsa_indexer_rope_interleaved must be true"),
    ({"dsa_indexer_n_heads": 4}, "dsa_indexer_n_heads must be None without"),
    ({**_DSA, "dsa_indexer_scoring_relu": False}, "dsa_indexer_scoring_relu must be True"),
    ({**_DSA, "dsa_indexer_k_norm_epsilon": 1e-5}, "dsa_indexer_k_norm_epsilon must be 1e-06"),
    ({**_DSA, "dsa_indexer_topk_freq": 4}, "dsa_indexer_topk_freq must be 1 without"),
    ({**_DSA, "dsa_indexer_head_dim": 4}, "index_head_dim must be at least qk_rope_head_dim 8"),
    ({**_DSA, "q_lora_rank": None}, "q_lora_rank must be an integer: the indexer reads"),
    ({**_DSA, **_SOFTMAX}, "moe_router_score_function must be 'sigmoid' with sparse attention"),
    ({"normalization": torch.ones(2)}, "args.normalization must be 'RMSNorm', got tensor"),
    ({"num_layers": ...}, "args.num_layers is missing"),
    ({"kv_lora_rank": -1}, "args.kv_lora_rank must be an integer from 1 to"),
    ({"moe_layer_freq": [0, 1, 0, 1]}, "one entry for each of --num-layers 3, got 4"),
    ({"moe_layer_freq": [1, 1, 0]}, "args.moe_layer_freq must be dense layers, then every N-th"),
    ({"moe_shared_expert_intermediate_size": 17}, "must be a multiple of 16, got 17"),
    ({"moe_router_enable_expert_bias": False}, "must be True with sigmoid scores, got False"),
    ({"moe_router_score_function": "softmax"}, "must be False with softmax scores, got True"),
    ({"moe_router_group_topk": 1, "moe_router_num_groups": None}, "moe_router_num_groups is miss"),
    (
        {**_SOFTMAX, "moe_router_pre_softmax": False},
        "args.moe_router_pre_softmax must be True with moe_router_group_topk",
    ),
    ({"moe_router_norm_topk_prob": 0}, "args.moe_router_norm_topk_prob must be true or false"),
    (
        {**_SOFTMAX, "moe_router_pre_softmax": False, **_NO_GROUPS}
        | {"moe_router_norm_topk_prob": True},
        "args.moe_router_pre_softmax must be True with moe_router_norm_topk_prob",
    ),
    (
        {"moe_router_topk": 1, "moe_router_group_topk": 2, "moe_router_num_groups": 4},
        "args.moe_router_topk must be at least moe_router_group_topk 2",
    ),
    ({"mscale": 0.5, "mscale_all_dim": 0.0}, "args.mscale must be 1 with mscale_all_dim 0"),
    ({"llama_4_scaling_beta": 0.1}, "llama_4_scaling_beta must be None with sigmoid scores or sp"),
    (
        {**_SOFTMAX, **_NO_GROUPS, "post_mlp_layernorm": True},
        "args.post_mlp_layernorm must be False with softmax scores or sparse attention",
    ),
    ({"llama_4_scaling_beta": -1.0}, "args.llama_4_scaling_beta must be a number from 0"),
    (
        {**_SOFTMAX, **_NO_GROUPS, "llama_4_scaling_beta": 0.1, "rope_type": "rope"}
        | {"mscale_all_dim": 0.0},
        "args.llama_4_scaling_beta must be None with rope_type 'rope'",
    ),
    ({"use_mup": True}, "args.use_mup must be left out with experts, sparse attention"),
    ({"use_mup": True, "num_experts": None, "mup_output_mult": 0.3}, "a whole number divided by"),
    (
        {**_PLAIN_DENSE, "rope_factors": [1.0]},
        "args.rope_factors must be a list of 4 numbers from 1e-06",
    ),
    (
        {"rope_factors": [1.0] * 4, "num_experts": None},
        "args.rope_factors must be None with rope_type 'yarn'",
    ),
    ({"rope_type": "rope"}, "args.mscale_all_dim must be 0 with rope_type 'rope' and rotary_sc"),
    ({"params_dtype": "bf16"}, "args.params_dtype must be torch.bfloat16 or torch.float16 or"),
]


@pytest.mark.parametrize(("changes", "message"), _REFUSED, ids=[m[:40] for _, m in _REFUSED])
def test_what_hugging_face_has_not_is_named(changes, message):
    with refused(message, problems=1):
        from_megatron_args(_args(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Megatron's own ranking by the best three of a group.
        (
            {"num_experts": 12, "moe_router_topk": 6, "moe_router_group_topk": 2}
            | {"moe_router_num_groups": 3},
            {"moe_router_group_score_topk": 3},
        ),
        # The softmax of the chosen experts.
        (
            {**_SOFTMAX, **_NO_GROUPS, "moe_router_pre_softmax": False},
            {"moe_router_norm_topk_prob": True},
        ),
    ],
)
def test_routing_of_megatron_alone(tmp_path, changes, expected):
    """It comes back as it was; a config.json of transformers could not say it."""
    args = _args(**changes, **dict.fromkeys(ROUTER_OPTIONS, ...))
    config = from_megatron_args(args)
    found = {name: config.hugging_face.get(name) for name in ROUTER_OPTIONS}
    assert {name: value for name, value in found.items() if value is not None} == expected
    back = vars(to_megatron_args(config))
    assert {name: back[name] for name in changes} == changes
    assert {back[name] for name in ROUTER_OPTIONS} == {None}, "Megatron's router does it"
    folder = write_hugging_face(tmp_path / "hf", config, random_tensors(config))
    convert(folder, tmp_path / "absorbed", "absorbed", dry_run=True)
    with refused("transformers would choose other experts", *map(str, expected)):
        convert(folder, tmp_path / "other", "hf", TargetOptions(dtype=torch.float32))


def test_what_a_real_run_leaves_to_megatrons_defaults():
    """The command line has no YaRN range; release 0.18 calls the epsilon otherwise."""
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale_all_dim")
    args = _args(**dict.fromkeys(names, ...), layernorm_epsilon=..., rope_type=None)
    defaults = {field.name: field.default for field in dataclasses.fields(MLATransformerConfig)}
    raw = from_megatron_args(args).hugging_face
    assert {name: raw["rope_scaling"][name] for name in names} == {n: defaults[n] for n in names}
    assert raw["rms_norm_eps"] == 1e-6
    without_factor = from_megatron_args(_args(rotary_scaling_factor=...)).hugging_face
    assert without_factor["rope_scaling"]["factor"] == defaults["rotary_scaling_factor"]


def test_yarn_without_mscale_means_what_it_means_in_transformers():
    """cos and sin are scaled by the factor alone, the softmax not at all."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for extra in ({}, {"mscale": 0.5}, {"mscale_all_dim": 0.0}):
        args = to_megatron_args(tiny_config(rope_scaling={**scaling, **extra}))
        assert (args.mscale, args.mscale_all_dim) == (1.0, 0.0)
        back = from_megatron_args(args).hugging_face["rope_scaling"]
        assert not (back["mscale"] and back["mscale_all_dim"])
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    raw = {**tiny_config(rope_scaling=scaling).hugging_face}
    loaded = auto.CONFIG_MAPPING["deepseek_v3"].from_dict(raw)
    _, concentration = utils.ROPE_INIT_FUNCTIONS["yarn"](loaded)
    assert concentration == pytest.approx(0.1 * math.log(4) + 1)


def test_a_config_without_its_json_is_an_error():
    bare = dataclasses.replace(tiny_config(), hugging_face={})
    with refused("does not say what Megatron needs to know"):
        to_megatron_args(bare)


_NAMES = sorted(vars(to_megatron_args(ModelConfig.from_hugging_face(DEEPSEEK_V3))))
_VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet="01[]()*+, ", max_size=12)
    | st.lists(st.integers(0, 2), max_size=4)
    | st.sampled_from(
        ["yarn", "rope", "softmax", torch.bfloat16, torch.int8, torch.ones(3), 2**200]
    )
)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=5),
    dropped=st.sets(st.sampled_from(_NAMES), max_size=3),
)
def test_hostile_arguments_are_errors_or_models(changes, dropped):
    args = _args(**changes, **dict.fromkeys(dropped - set(changes), ...))
    try:
        config = from_megatron_args(args)
    except CheckpointError:
        return
    args = to_megatron_args(config)
    assert to_megatron_args(from_megatron_args(args)) == args


@pytest.mark.parametrize("args", [None, [], "args", 3])
def test_other_than_arguments_is_an_error(args):
    with refused("args must be a namespace"):
        from_megatron_args(args)
