"""Options, configs and specs that are refused before any work, at construction.

A refusal that is missing here is an option that is silently ignored, or a wrong result.
"""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig

import specs.absorbed_mla_layer_specs as layer_specs
from absorbed_mla import AbsorbedMLAOptions, AbsorbedMLASelfAttention, MLADims
from absorbed_mla.linear import DuplicatedLinear
from absorbed_mla.norm import RMSNorm
from absorbed_mla.options import CORE_ATTENTION_BACKENDS, ROUTER_OPTIONS
from absorbed_mla.projections import ProjectionBuilder
from checkpoint_conversion import routing
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal


def config_with(**fields) -> MLATransformerConfig:
    """A config changed after its own checks, which refuse some of it in their own words."""
    config = config_for(TINY)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def attention_spec(config, **options):
    options = AbsorbedMLAOptions(**options)
    spec = layer_specs.get_absorbed_mla_layer_spec(config, backend="local", options=options)
    return spec.submodules.self_attention


def build(config, **more) -> AbsorbedMLASelfAttention:
    spec = attention_spec(config_for(TINY))
    return AbsorbedMLASelfAttention(config, spec.submodules, layer_number=1, **more)


EXPANDED = ("cudnn", "flash_attention_4", "hopper_expanded", "reference", "transformer_engine")


class TestOptions:
    @pytest.mark.parametrize(
        "name, values, accepts",
        [
            ("form", ["fused", None], "auto, absorbed, expanded"),
            ("down_projection", ["row_parallel"], "duplicated, column_parallel"),
            ("core_attention_backend", ["flash"], ", ".join(CORE_ATTENTION_BACKENDS)),
            ("sparse_attention_backend", ["hpoper"], "auto, hopper, reference, triton"),
            ("indexer_backend", ["hpoper"], "auto, hopper, reference, reference_fp8"),
            ("latent_norm_eps", [0.0, 1.0, -1e-6, math.nan, "1e-6"], "None or between 0 and 1"),
            ("attention_output_gate", ["per_head", True], "None, headwise, elementwise"),
            ("k_rope_layernorm", [None, 1], "True or False"),
            ("post_mlp_layernorm", [None, 1], "True or False"),
            ("llama_4_scaling_beta", [0, -0.1, math.inf, "0.1"], "None or above 0"),
            ("rope_factors", [[1.0], (0.0,), (math.nan,), ("1",)], "tuple of numbers above 0"),
            ("query_chunk_size", [0, -64, 64.0, True], "at least 1"),
            ("expansion_chunk_size", [0, 1.5], "at least 1"),
        ],
    )
    def test_bad_value(self, name, values, accepts):
        for value in values:
            with refusal(name, accepts, f"got {value!r}"):
                AbsorbedMLAOptions(**{name: value})
            with refusal(name):
                AbsorbedMLAOptions().replace(**{name: value})

    def test_good_values(self):
        options = AbsorbedMLAOptions(latent_norm_eps=1e-6, query_chunk_size=1, form="expanded")
        assert options.replace(form="absorbed") == dataclasses.replace(options, form="absorbed")
        assert AbsorbedMLAOptions.coerce(options) is options
        assert AbsorbedMLAOptions.coerce(None) == AbsorbedMLAOptions()

    def test_frozen_and_by_keyword(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            AbsorbedMLAOptions().form = "absorbed"
        with pytest.raises(TypeError):
            AbsorbedMLAOptions("absorbed")

    def test_not_options(self):
        given, config = {"form": "absorbed"}, config_for(TINY)
        with refusal("options", "AbsorbedMLAOptions or None", f"got {given!r}"):
            build(config, options=given)
        for name in ("layer", "decoder_block"):
            get_spec = getattr(layer_specs, f"get_absorbed_mla_{name}_spec")
            with refusal("options", "AbsorbedMLAOptions or None", f"got {given!r}"):
                get_spec(config, backend="local", options=given)

    @pytest.mark.parametrize(
        ("form", "backend", "fitting"),
        [
            ("absorbed", "flash_attention_4", "auto, hopper, reference, triton"),
            ("expanded", "hopper", f"auto, {', '.join(EXPANDED)}"),
        ],
    )
    def test_backend_of_the_other_form(self, form, backend, fitting):
        """Otherwise the first forward would say so, after a model was built."""
        given = f"core_attention_backend={backend!r}"
        with refusal(given, "only", f"got form={form!r}", f"one of {fitting}"):
            AbsorbedMLAOptions(form=form, core_attention_backend=backend)
        options = AbsorbedMLAOptions(core_attention_backend=backend)
        with refusal(given, f"got form={form!r}"):
            options.replace(form=form)


# Value to refuse -> what the message recommends.
UNSUPPORTED = {
    "multi_latent_attention": (False, "True"),
    "hierarchical_context_parallel_sizes": ([2, 2], "None"),
    "fp8_dot_product_attention": (True, "False"),
    "fp8_multi_head_attention": (True, "False"),
    "fp4": ("e2m1", "None"),
    "flash_decode": (True, "False"),
    "experimental_attention_variant": ("gated_delta_net", "None"),
    "apply_query_key_layer_scaling": (True, "False"),
    "qk_l2_norm": (True, "False"),
    "softmax_type": ("sigmoid", "'vanilla'"),
    "softmax_scale": (0.1, "None"),
    "attention_backend": (AttnBackend.flash, repr(AttnBackend.auto)),
    "normalization": ("LayerNorm", "'RMSNorm'"),
    "transformer_impl": ("inference_optimized", "'local'"),
    "mrope_section": ([2, 1, 1], "None"),
    "add_qkv_bias": (True, "False"),
    "quant_recipe": ("recipe", "None"),
    "use_kitchen": (True, "False"),
}
POSITIVE = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_head_dim", "v_head_dim")
# Fields -> what the message holds.
REFUSED = [
    *(({name: 0, "num_query_groups": None}, (name, "at least 1", "got 0")) for name in POSITIVE),
    ({"q_lora_rank": 0}, ("q_lora_rank", "None or at least 1", "got 0")),
    *(
        ({"qk_pos_emb_head_dim": width}, ("even", "not negative", f"got {width}"))
        for width in (7, -2)
    ),
    ({"cuda_graph_impl": "full_iteration"}, ("full_iteration", "set it to 'none'")),
    ({"num_query_groups": 2}, ("num_query_groups", "num_attention_heads=4", "got 2")),
    ({"fp8": "hybrid"}, ("fp8='hybrid'", "backend='transformer_engine'", "got RowParallelLinear")),
    ({"fp8": "hybrid", "fp8_param": True}, ("fp8_param=True", "use_cpu_initialization=False")),
    ({"no_rope_freq": [0, 1]}, ("no_rope_freq", "list of num_layers=1 zeros", "got [0, 1]")),
    ({"no_rope_freq": 4}, ("no_rope_freq", "list of num_layers=1 zeros", "got 4")),
    (
        {"no_rope_freq": [0, 1], "num_layers": 2, "mtp_num_layers": 1},
        ("no_rope_freq", "alike", "mtp_num_layers=1", "got [0, 1]"),
    ),
    ({"rope_type": "dynamic"}, ("rope_type", "rope, yarn", "'dynamic'")),
    ({"rotary_percent": 0.5}, ("rotary_percent", "1.0", "got 0.5")),
    ({"rotary_scaling_factor": 0}, ("rotary_scaling_factor", "positive", "got 0")),
    (
        {"original_max_position_embeddings": -1},
        ("original_max_position_embeddings", "positive", "got -1"),
    ),
    *(
        ({name: value}, (f"{name}={value!r}", "not support", f"set it to {instead}"))
        for name, (value, instead) in UNSUPPORTED.items()
    ),
]


class TestConfig:
    @pytest.mark.parametrize(
        "fields, parts", REFUSED, ids=lambda x: "" if isinstance(x, tuple) else next(iter(x))
    )
    def test_refused(self, fields, parts):
        known = config_for(TINY)
        assert all(hasattr(known, name) for name in fields), "another name is never refused"
        with refusal(*parts):
            build(config_with(**fields))

    def test_fused_rope(self):
        """On in recipes of standard MLA; ours is one kernel on GPUs whatever it says."""
        hidden = torch.randn(5, 2, TINY.hidden, dtype=torch.float64, device=world.device())
        plain, fused = (build_attention(TINY, Setup(), apply_rope_fusion=x) for x in (False, True))
        fused.load_state_dict(plain.state_dict())
        assert torch.equal(plain(hidden, None)[0], fused(hidden, None)[0])

    @pytest.mark.parametrize("value", ["a2a", "a2a+p2p", "ring", ["p2p"], 3])
    def test_cp_comm_type(self, value):
        with refusal("cp_comm_type", "all_gather, p2p", f"got {value!r}", "one head for all"):
            build(config_for(TINY), cp_comm_type=value)

    def test_heads_do_not_divide(self):
        with refusal("num_attention_heads=4", "divisible by", "tensor_model_parallel_size=3"):
            MLADims.from_config(config_for(TINY), 3)

    def test_norm(self):
        with refusal("normalization='LayerNorm'", "RMSNorm only"):
            RMSNorm(config_with(normalization="LayerNorm"), 8)


# What of a model is asked for -> fields of the config that do not go with it, and the message.
VARIANTS_REFUSED = {
    "k_rope_layernorm": (
        True,
        {"qk_pos_emb_head_dim": 0},
        ("qk_pos_emb_head_dim above 0", "got 0"),
    ),
    "llama_4_scaling_beta": (
        0.1,
        {"rope_type": "rope", "original_max_position_embeddings": 0},
        ("original_max_position_embeddings", "at least 1", "got 0"),
    ),
    "rope_factors": (
        (1.0,) * 4,
        {"rope_type": "yarn"},
        ("qk_pos_emb_head_dim / 2 = 4", "rope_type 'rope'", "got 4 with 'yarn'"),
    ),
    "attention_output_gate": (
        "elementwise",
        {"attention_output_gate": True, "gated_attention_proj_granularity": "headwise"},
        ("gate 'headwise'", "'elementwise'", "set one"),
    ),
}


class TestVariants:
    @pytest.mark.parametrize("name", VARIANTS_REFUSED)
    def test_refused(self, name):
        value, fields, parts = VARIANTS_REFUSED[name]
        spec, options = attention_spec(config_for(TINY)), AbsorbedMLAOptions(**{name: value})
        with refusal(name, *parts):
            AbsorbedMLASelfAttention(config_with(**fields), spec.submodules, 1, options=options)

    def test_rows_that_fp8_cannot_multiply(self):
        options = AbsorbedMLAOptions(attention_output_gate="headwise")
        with refusal("attention_output_gate='headwise'", "fp8='hybrid'", "16 rows", "got 4"):
            build(config_with(fp8="hybrid"), options=options)

    def test_spec_without_the_layer(self):
        """One that a program made before there were gates."""
        spec, config = attention_spec(config_for(TINY)), config_for(TINY)
        submodules = dataclasses.replace(spec.submodules, linear_gate=None)
        options = AbsorbedMLAOptions(attention_output_gate="headwise")
        with refusal("no linear_gate", "same config and options"):
            AbsorbedMLASelfAttention(config, submodules, 1, options=options)

    @pytest.mark.parametrize("kind, width", [("headwise", 1), ("elementwise", TINY.v)])
    def test_gate_of_the_config(self, kind, width):
        """Megatron's branch dev has fields for it."""
        fields = {"attention_output_gate": True, "gated_attention_proj_granularity": kind}
        built = build(config_with(**fields))
        assert built.linear_gate.weight.shape == (TINY.heads * width, TINY.hidden)

    def test_layers_that_do_not_rotate(self):
        """By their numbers in the model."""
        config = config_for(TINY, num_layers=4, no_rope_freq=4)
        spec = attention_spec(config)
        layers = [AbsorbedMLASelfAttention(config, spec.submodules, i + 1) for i in range(4)]
        assert [layer.rotates for layer in layers] == [True, True, True, False]


class HalfOfTheRows(ColumnParallelLinear):
    def __init__(self, inputs, outputs, **kwargs):
        super().__init__(inputs, outputs // 2, **kwargs)


@pytest.mark.parametrize(
    ("tp_size", "kind", "layer", "parts"),
    [
        (3, "column_parallel", None, ("16 rows of linear_q_down_proj", "size=3", "='duplicated'")),
        (2, "duplicated", HalfOfTheRows, ("(HalfOfTheRows) is column_parallel", "same options")),
        (2, "column_parallel", DuplicatedLinear, ("(DuplicatedLinear) is duplicated",)),
    ],
    ids=["rows do not divide", "sharded, not asked for", "whole, not asked for"],
)
def test_down_projection(tp_size, kind, layer, parts):
    """A rank that holds a part of the rows must not take them for the whole, or vice versa."""
    attention = build_attention(TINY, Setup())
    options = AbsorbedMLAOptions(down_projection=kind)
    # The builder asks for the size first; Megatron's layers, which ask later, are told 1.
    sizes = iter([tp_size])
    group = SimpleNamespace(size=lambda: next(sizes, 1), rank=lambda: 0)
    submodules = attention_spec(attention.config, down_projection=kind).submodules
    if layer:
        submodules = dataclasses.replace(submodules, linear_q_down_proj=layer)
    with refusal(f"down_projection={kind!r}", *parts):
        builder = ProjectionBuilder(
            submodules, attention.config, options, SimpleNamespace(tp=group), None
        )
        builder.down_projection("linear_q_down_proj", (attention.dims.q_lora_rank,))


def test_the_conversion_names_the_options_of_a_router():
    """It runs without this package's layers, and has names of its own."""
    assert routing.ROUTER_OPTIONS == ROUTER_OPTIONS
    assert {*ROUTER_OPTIONS} < {field.name for field in dataclasses.fields(AbsorbedMLAOptions)}
