"""config.json to the dimensions of a model: what is read, what is refused, what is written."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.megatron_args import megatron_notes, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.model_type import MODELS, Refused
from tests.conversion.released import DEEPSEEK_V2_LITE, DEEPSEEK_V3, KIMI_K2, MOONLIGHT, RELEASED
from tests.conversion.support import (
    GLM5,
    MINICPM3,
    MISTRAL4,
    V2_LITE,
    V32,
    YARN,
    hugging_face_config,
    refused,
    tiny_config,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from training.presets import get_preset

# Fields of ModelConfig that the presets have, and what these call some of them.
_IN_PRESETS = """
vocab_size num_layers hidden_size ffn_hidden_size num_attention_heads q_lora_rank kv_lora_rank
qk_nope_head_dim qk_rope_head_dim v_head_dim num_experts moe_ffn_hidden_size router_bias
"""
_PRESET_NAMES = {
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "router_bias": "moe_router_enable_expert_bias",
}
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")
_MIXED = ["full", "shared", "full"]
_WITHOUT_DEFAULT = """
vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads
n_routed_experts n_shared_experts q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim
v_head_dim first_k_dense_replace
"""


def _without(config: dict, *names: str) -> dict:
    return {k: v for k, v in config.items() if k not in names}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_the_presets_dimensions(name):
    config, preset = ModelConfig.from_hugging_face(RELEASED[name]), get_preset(name)
    for own in _IN_PRESETS.split():
        assert getattr(config, own) == preset[_PRESET_NAMES.get(own, own)], own
    assert config.moe_layers == tuple(map(bool, preset["moe_layer_freq"]))
    shared = config.num_shared_experts * config.moe_ffn_hidden_size
    assert shared == preset["moe_shared_expert_intermediate_size"]


def test_mtp_layers_and_tied_embeddings():
    assert ModelConfig.from_hugging_face(DEEPSEEK_V3).mtp_layers == 1
    assert ModelConfig.from_hugging_face(DEEPSEEK_V2_LITE).mtp_layers == 0
    assert tiny_config(tie_word_embeddings=True).tied_embeddings
    assert not tiny_config().tied_embeddings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"first_k_dense_replace": 1}, (0, 1, 1)),
        ({"first_k_dense_replace": 0}, (1, 1, 1)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (0, 0, 1)),
        ({"first_k_dense_replace": 3}, (0, 0, 0)),
        ({"n_routed_experts": None}, (0, 0, 0)),
    ],
)
def test_which_layers_are_mixtures_of_experts(changes, expected):
    config = tiny_config(**changes)
    assert config.moe_layers == tuple(map(bool, expected))
    experts = (config.num_experts, config.moe_ffn_hidden_size, config.num_shared_experts)
    assert experts == ((4, 16, 2) if any(expected) else (0, 0, 0))
    assert config.router_bias == any(expected)


def test_a_dense_model_needs_no_experts():
    moe = ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "num_experts_per_tok")
    config = _without(hugging_face_config(first_k_dense_replace=3), *moe)
    assert ModelConfig.from_hugging_face(config).num_experts == 0


def test_no_shared_experts():
    assert tiny_config(n_shared_experts=None).num_shared_experts == 0


def test_transformers_5_style_is_the_same_model():
    new = _without(hugging_face_config(), "rope_scaling", "rope_theta", "torch_dtype")
    scaling = {**hugging_face_config()["rope_scaling"], "rope_theta": 10000, "rope_type": "yarn"}
    config = ModelConfig.from_hugging_face({**new, "rope_parameters": scaling, "dtype": "float16"})
    assert config == tiny_config()
    assert config.dtype == torch.float16
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_type must be"):
        ModelConfig.from_hugging_face({**new, "rope_parameters": {"rope_type": "linear"}})


def test_configs_that_transformers_writes():
    transformers = pytest.importorskip("transformers")
    for kind, changes in (
        (transformers.DeepseekV3Config, {}),
        (transformers.DeepseekV2Config, V2_LITE),
    ):
        old = hugging_face_config(**changes)
        written = kind.from_dict(old).to_dict()
        assert "rope_parameters" in written, "the other style is what this is about"
        assert ModelConfig.from_hugging_face(written) == ModelConfig.from_hugging_face(old)


_FP8 = {"quant_method": "fp8"}
_GLM = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
_SCALED = {"rope_parameters": {**YARN, "llama_4_scaling_beta": -0.1}}
REFUSED = [model for model in MODELS if isinstance(model, Refused)]


def _longrope(**changes) -> dict:
    return {**MINICPM3, "rope_scaling": {**MINICPM3["rope_scaling"], **changes}}


_IN_TEXT = {"quantization_config": {"quant_method": "compressed-tensors"}}
_REFUSED = [
    ({"model_type": ["deepseek_v3"], "text_config": {}}, "model_type ['deepseek_v3'] has a text"),
    ({"model_type": "llama"}, "must be 'axk1' or 'deepseek_v2' or 'deepseek_v3'"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures must be ['DeepseekV3ForCausalLM']"),
    ({"architectures": "DeepseekV3ForCausalLM"}, "architectures must be"),
    ({"attention_bias": True}, "attention_bias must be False, got True"),
    ({"attention_bias": 0}, "attention_bias must be False, got 0"),
    ({"mlp_bias": True}, "mlp_bias must be False"),
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"rope_interleave": False}, "rope_interleave must be True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    (
        {"quantization_config": {"quant_method": "awq"}},
        "quant_method must be 'fp8' or 'compressed-tensors', got 'awq'",
    ),
    (
        {"quantization_config": {**_FP8, "weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size must be [128, 128], got [64, 64]",
    ),
    ({"quantization_config": _FP8}, "weight_block_size is missing; it must be [128, 128]"),
    ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads 4, got 2"),
    ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type must be"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object, got [1]"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters and rope_scaling must agree"),
    ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype must be 'bfloat16' or 'float16' or 'float32'"),
    ({"dtype": "float32"}, "dtype must be the same as torch_dtype, 'bfloat16', got 'float32'"),
    ({"q_lora_rank": 0}, "q_lora_rank must be null or an integer from 1 to"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok must be at most n_routed_experts 4, got 5"),
    ({"n_group": 3}, "n_group must be a divisor of n_routed_experts 4, got 3"),
    ({"topk_group": 3}, "topk_group must be at most n_group 2, got 3"),
    ({"n_routed_experts": 60000, "num_hidden_layers": 100}, "in all 100 layers together"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    # Sparse attention.
    ({"index_topk": 2048}, "index_topk must be left out: sparse attention is that of deepseek_v32"),
    ({size: V32[size] for size in _INDEXER}, tuple(f"{size} must be left" for size in _INDEXER)),
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
    # Models of other names.
    (
        {"model_type": "longcat_flash"},
        ("mla_scale_q_lora", "two attentions in a layer", "zero_expert_num"),
    ),
    (
        {"model_type": "llava", "text_config": {"model_type": "mistral4"}},
        ("'llava' has a text model ('mistral4')", "kimi_k25 or mistral3's is taken out of it"),
    ),
    (
        {"model_type": "kimi_k25", "text_config": hugging_face_config(**_IN_TEXT)},
        ("quantization_config.format is missing", "quantization_config.config_groups is missing"),
    ),
    (_longrope(attention_factor=1.2), "rope_scaling.attention_factor must be 1.0, got 1.2"),
    (_longrope(short_factor=[1, 0, 1, 1]), "short_factor must be a list of 4 numbers from 1e-06"),
    (
        _longrope(original_max_position_embeddings=64),
        "original_max_position_embeddings must be at least max_position_embeddings 128: no long",
    ),
    ({**MINICPM3, "scale_emb": 0}, "scale_emb must be a number from 1e-06"),
    (MISTRAL4 | _SCALED, "rope_parameters.llama_4_scaling_beta must be a number from 0"),
    ({**_SCALED, "rope_scaling": None}, "beta must be left out: transformers does not scale"),
    (MISTRAL4 | {"n_group": 2}, "n_group must be 1"),
    (MISTRAL4 | {"rope_parameters": None}, "rope_parameters is missing"),
    (MISTRAL4 | {"quantization_config": _FP8}, "quantization_config must be left out"),
    (_GLM | {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must be a list of 3"),
    (_GLM | {"mlp_layer_types": [[], {}, "dense"]}, "mlp_layer_types must be a list of 3"),
]


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.name)
def test_missing_parts_of_other_models_are_named(model):
    """By each of its names, and inside of a model of images."""
    for name in (model.name, *model.also):
        for fields in (
            {"model_type": name},
            {"model_type": "x", "text_config": {"model_type": name}},
        ):
            with refused(f"model_type {name!r} has {model.lacking}, which Megatron-Core lacks"):
                ModelConfig.from_hugging_face(fields)


@pytest.mark.parametrize(
    ("changes", "messages"), _REFUSED, ids=[str(message)[:40] for _, message in _REFUSED]
)
def test_what_cannot_be_converted_is_named(changes, messages):
    messages = messages if isinstance(messages, tuple) else (messages,)
    with pytest.raises(CheckpointError) as error:
        tiny_config(**changes)
    assert all(message in str(error.value) for message in messages)
    few = max(2, len(changes))
    assert len(error.value.problems) <= few, "one mistake, not everything that follows from it"


def test_what_minicpm3_leaves_out():
    """As transformers has it: null means that nothing is scaled."""
    fields = _without(hugging_face_config(**MINICPM3), "v_head_dim")
    for scales in ({}, {"scale_emb": 1, "scale_depth": None, "dim_model_base": None}):
        config = ModelConfig.from_hugging_face(fields | scales)
        theirs = transformers.MiniCPM3Config(**fields | scales)
        args = to_megatron_args(config)
        assert config.v_head_dim == theirs.v_head_dim == 8 and config.tied_embeddings is False
        residual = theirs.scale_depth / 3**0.5
        assert args.mup_embedding_mult == theirs.scale_emb / residual
        assert args.mup_output_mult == 1 / theirs.logits_scaling
        assert args.layernorm_epsilon == theirs.rms_norm_eps / residual**2
        assert "no LongRoPE" in megatron_notes(config)[-1]


def test_released_config_of_glm():
    """GLM-4.7-Flash's own, which says first_k_dense_replace instead of mlp_layer_types."""
    config = tiny_config(**_GLM, partial_rotary_factor=1.0, rope_scaling=None, n_group=1)
    assert config.moe_layers == (False, True, True)
    assert config.router_bias


@pytest.mark.parametrize("value", [0, -1, 2**40, 2**200, True, "32", 32.0, float("nan"), [32], {}])
@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers", "v_head_dim"])
def test_absurd_sizes(name, value):
    with pytest.raises(CheckpointError, match=rf"{name} must be an integer from 1 to \d+, got"):
        tiny_config(**{name: value})


def test_integers_that_python_does_not_print():
    with pytest.raises(CheckpointError, match="got <integer of 16610 bits>"):
        tiny_config(hidden_size=10**5000)
    with pytest.raises(CheckpointError, match="architectures must be"):
        tiny_config(architectures=[10**5000])


def test_every_problem_is_listed_once():
    config = _without(hugging_face_config(hidden_size="x", hidden_act="gelu"), "vocab_size")
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_hugging_face(config)
    assert sorted(problem.split()[0] for problem in error.value.problems) == [
        "hidden_act",
        "hidden_size",
        "vocab_size",
    ]


@pytest.mark.parametrize("name", sorted(set(DEEPSEEK_V3) & set(KIMI_K2) & set(MOONLIGHT)))
def test_a_missing_field_is_a_default_or_named(name):
    config = _without(DEEPSEEK_V3, name)
    try:
        ModelConfig.from_hugging_face(config)
    except CheckpointError as error:
        assert [problem.split()[0] for problem in error.problems] == [name]


def test_sizes_have_no_default():
    for name in _WITHOUT_DEFAULT.split():
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            ModelConfig.from_hugging_face(_without(DEEPSEEK_V3, name))


_INNER = sorted(
    {*DEEPSEEK_V3["rope_scaling"], *DEEPSEEK_V3["quantization_config"], "rope_type", "scale_fmt"}
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["yarn", "default", "fp8", "bfloat16", 1, 64, 2**200]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(_INNER), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from([DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V2_LITE, MOONLIGHT]),
    changes=st.dictionaries(
        st.sampled_from(sorted({*DEEPSEEK_V3, "rope_parameters", "dtype", "index_topk"})),
        _VALUES,
        max_size=6,
    ),
    dropped=st.sets(st.sampled_from(sorted(DEEPSEEK_V3)), max_size=4),
)
def test_hostile_configs_are_errors_or_models(base, changes, dropped):
    try:
        config = ModelConfig.from_hugging_face(_without({**base, **changes}, *dropped))
    except CheckpointError:
        return
    assert len(config.moe_layers) == config.num_layers
    assert config.num_layers * config.num_experts <= 2**18
    assert config.dtype is None or config.dtype.is_floating_point


@given(_VALUES)
def test_other_than_an_object_is_an_error(value):
    with pytest.raises(CheckpointError):
        ModelConfig.from_hugging_face(value)


def test_config_json_is_kept_as_it_was():
    raw = {**DEEPSEEK_V3, "something_else": [1]}
    before = copy.deepcopy(raw)
    config = ModelConfig.from_hugging_face(raw)
    assert config.hugging_face == before
    config.without_quantisation().with_quantisation("ue8m0").with_dtype(torch.float16)
    config.with_mtp_layers(0)
    assert raw == config.hugging_face == before


def test_quantisation():
    config = ModelConfig.from_hugging_face(DEEPSEEK_V3)
    plain = config.without_quantisation()
    assert (config.quantisation, plain.quantisation) == (
        "FP8 in blocks of 128 x 128, float scales",
        None,
    )
    assert plain.hugging_face == _without(DEEPSEEK_V3, "quantization_config")
    assert plain.with_quantisation("float").hugging_face == DEEPSEEK_V3
    ue8m0 = plain.with_quantisation("ue8m0")
    assert ue8m0.hugging_face["quantization_config"]["scale_fmt"] == "ue8m0"
    assert (
        ModelConfig.from_hugging_face(ue8m0.hugging_face).quantisation
        == "FP8 in blocks of 128 x 128, ue8m0 scales"
    )


def test_dtype_is_written_under_the_name_it_had():
    old = tiny_config().with_dtype(torch.float32)
    assert old.hugging_face["torch_dtype"] == "float32"
    assert "dtype" not in old.hugging_face
    raw = {**_without(hugging_face_config(), "torch_dtype"), "dtype": "bfloat16"}
    new = ModelConfig.from_hugging_face(raw).with_dtype(torch.float16)
    assert new.hugging_face["dtype"] == "float16"
    assert "torch_dtype" not in new.hugging_face
    silent = ModelConfig.from_hugging_face(_without(hugging_face_config(), "torch_dtype"))
    assert silent.dtype is None
    assert silent.with_dtype(torch.bfloat16).dtype == torch.bfloat16


def test_mtp_layers_are_written():
    config = tiny_config(num_nextn_predict_layers=1)
    assert config.with_mtp_layers(1).hugging_face == config.hugging_face
    without = config.with_mtp_layers(0)
    assert without.mtp_layers == 0
    assert without.hugging_face["num_nextn_predict_layers"] == 0
    silent = ModelConfig.from_hugging_face(DEEPSEEK_V2_LITE)
    assert silent.with_mtp_layers(0).hugging_face == DEEPSEEK_V2_LITE
