"""Options, configs and specs that are refused before any work, at construction.

A refusal that is missing here is an option that is silently ignored, or a wrong result.
"""

from __future__ import annotations

import contextlib
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
from absorbed_mla.core_attention import latent_kernels
from absorbed_mla.core_attention.backend import AttentionRequest, examine
from absorbed_mla.core_attention.cost import Work
from absorbed_mla.core_attention.selection import choose
from absorbed_mla.linear import DuplicatedLinear
from absorbed_mla.norm import RMSNorm
from absorbed_mla.options import CORE_ATTENTION_BACKENDS, FORMS
from absorbed_mla.projections import ProjectionBuilder
from absorbed_mla.unsupported import refuse_unsupported_config
from tests.support.backends import determinism
from tests.support.cases import TINY, config_for
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal

DIMS = MLADims.from_config(config_for(TINY), 1)


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


def build(config) -> AbsorbedMLASelfAttention:
    spec = attention_spec(config_for(TINY))
    return AbsorbedMLASelfAttention(config, spec.submodules, layer_number=1)


@pytest.fixture(scope="module")
def attention() -> AbsorbedMLASelfAttention:
    return build_attention(TINY, Setup())


class TestOptions:
    @pytest.mark.parametrize(
        "name, value, accepts",
        [
            ("form", "fused", "auto, absorbed, expanded"),
            ("form", None, "auto, absorbed, expanded"),
            ("down_projection", "row_parallel", "duplicated, column_parallel"),
            ("core_attention_backend", "flash", ", ".join(CORE_ATTENTION_BACKENDS)),
            ("latent_norm_eps", 0.0, "None or between 0 and 1"),
            ("latent_norm_eps", 1.0, "None or between 0 and 1"),
            ("latent_norm_eps", -1e-6, "None or between 0 and 1"),
            ("latent_norm_eps", math.nan, "None or between 0 and 1"),
            ("latent_norm_eps", "1e-6", "None or between 0 and 1"),
            ("query_chunk_size", 0, "at least 1"),
            ("query_chunk_size", -64, "at least 1"),
            ("query_chunk_size", 64.0, "at least 1"),
            ("query_chunk_size", True, "at least 1"),
            ("expansion_chunk_size", 0, "at least 1"),
            ("expansion_chunk_size", 1.5, "at least 1"),
        ],
    )
    def test_bad_value(self, name, value, accepts):
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

    @pytest.mark.parametrize(
        "take",
        [
            lambda options: AbsorbedMLASelfAttention(
                config_for(TINY), attention_spec(config_for(TINY)).submodules, 1, options=options
            ),
            lambda options: layer_specs.get_absorbed_mla_layer_spec(
                config_for(TINY), backend="local", options=options
            ),
            lambda options: layer_specs.get_absorbed_mla_decoder_block_spec(
                config_for(TINY), backend="local", options=options
            ),
        ],
        ids=["attention", "layer", "block"],
    )
    def test_not_options(self, take):
        given = {"form": "absorbed"}
        with refusal("options", "AbsorbedMLAOptions or None", f"got {given!r}"):
            take(given)

    @pytest.mark.parametrize(
        ("form", "backend", "fitting"),
        [
            ("absorbed", "flash_attention_4", "auto, flash_attention_3, hopper, triton, reference"),
            (
                "expanded",
                "hopper",
                "auto, flash_attention_4, cudnn, transformer_engine, reference",
            ),
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

    def test_backend_of_another_version(self):
        """The name may come from elsewhere than checked options."""
        with refusal("core_attention_backend", ", ".join(CORE_ATTENTION_BACKENDS), "'flash'"):
            examine("flash", REQUEST)


REQUEST = AttentionRequest(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    key_width=192,
    value_width=128,
    latent=False,
    masked=False,
    dropout=False,
)
# What cuDNN cannot do -> the reason it gives.
BEYOND_CUDNN = {
    "device": (torch.device("cpu"), "needs a GPU"),
    "dtype": (torch.float32, "fp16 and bf16"),
    "key_width": (260, "(260, 128) are not multiples of 8 up to 256"),
    "value_width": (512, "(192, 512)"),
    "latent": (True, "form='expanded'"),
    "masked": (True, "attention_mask"),
    "dropout": (True, "attention_dropout=0"),
}


class TestBackend:
    """The choice looks at the request alone; no GPU is needed to make it."""

    @pytest.fixture(autouse=True)
    def _hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(latent_kernels, "_too_long", lambda *_: None)
        with determinism(demanded=False):
            yield

    def test_what_can_run(self):
        runnable, _ = examine("auto", REQUEST)
        optional = ("flash_attention_4", "transformer_engine")
        assert [x.name for x in runnable if x.name not in optional] == ["cudnn", "reference"]
        assert [x.name for x in examine("reference", REQUEST)[0]] == ["reference"]

    @pytest.mark.parametrize("form", FORMS[1:])
    @pytest.mark.parametrize("name", CORE_ATTENTION_BACKENDS[1:])
    def test_options_know_which_form_it_computes(self, name, form):
        """They refuse what it refuses for its form, and nothing else."""
        request = dataclasses.replace(REQUEST, latent=form == "absorbed")
        refused = "form=" in examine(name, request)[1].get(name, "")
        with refusal(name, form) if refused else contextlib.nullcontext():
            AbsorbedMLAOptions(form=form, core_attention_backend=name)

    @pytest.mark.parametrize("field", BEYOND_CUDNN)
    def test_auto_falls_back_and_says_why(self, field):
        value, reason = BEYOND_CUDNN[field]
        runnable, refused = examine("auto", dataclasses.replace(REQUEST, **{field: value}))
        assert runnable[-1].name == "reference" and "cudnn" not in [x.name for x in runnable]
        assert reason in refused["cudnn"]

    @pytest.mark.parametrize("field", BEYOND_CUDNN)
    def test_an_explicit_choice_raises(self, field):
        value, reason = BEYOND_CUDNN[field]
        request = dataclasses.replace(REQUEST, **{field: value})
        with refusal("core_attention_backend='cudnn'", "cannot run here", reason):
            choose({"expanded": request}, "cudnn", DIMS, Work(1, 1, 1, training=True))

    def test_an_older_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert examine("cudnn", REQUEST) == ([], {"cudnn": "it needs compute capability 9.0"})

    def test_deterministic_algorithms(self):
        with determinism(demanded=True):
            assert "not deterministic" in examine("cudnn", REQUEST)[1]["cudnn"]


class TestDims:
    @pytest.mark.parametrize(
        "name", ["hidden_size", "num_attention_heads", "kv_lora_rank", "qk_head_dim", "v_head_dim"]
    )
    def test_not_positive(self, name):
        with refusal(name, "at least 1", "got 0"):
            build(config_with(**{name: 0}, num_query_groups=None))

    def test_q_lora_rank(self):
        with refusal("q_lora_rank", "None or at least 1", "got 0"):
            build(config_with(q_lora_rank=0))

    @pytest.mark.parametrize("width", [7, -2])
    def test_rotary_width(self, width):
        config = config_with(qk_pos_emb_head_dim=width)
        with refusal("qk_pos_emb_head_dim", "even", "not negative", f"got {width}"):
            build(config)

    def test_heads_do_not_divide(self):
        config = config_for(TINY)
        parts = ("num_attention_heads=4", "divisible by", "tensor_model_parallel_size=3")
        with refusal(*parts):
            MLADims.from_config(config, 3)


# Value to refuse -> what the message recommends.
UNSUPPORTED_CONFIG = {
    "multi_latent_attention": (False, "True"),
    "hierarchical_context_parallel_sizes": ([2, 2], "None"),
    "fp8": ("hybrid", "None"),
    "fp4": ("e2m1", "None"),
    "qk_clip": (True, "False"),
    "log_max_attention_logit": (True, "False"),
    "flash_decode": (True, "False"),
    "experimental_attention_variant": ("dsa", "None"),
    "apply_rope_fusion": (True, "False"),
    "mla_down_proj_fusion": (True, "False"),
    "attention_output_gate": (True, "False"),
    "apply_query_key_layer_scaling": (True, "False"),
    "qk_l2_norm": (True, "False"),
    "window_size": ((128, 0), "None"),
    "softmax_type": ("learnable", "'vanilla'"),
    "softmax_scale": (0.1, "None"),
    "attention_backend": (AttnBackend.flash, repr(AttnBackend.auto)),
    "normalization": ("LayerNorm", "'RMSNorm'"),
    "transformer_impl": ("inference_optimized", "'local'"),
    "cuda_graph_impl": ("transformer_engine", "'none'"),
    "no_rope_freq": ([0, 1], "None"),
    "mrope_section": ([2, 1, 1], "None"),
    "add_qkv_bias": (True, "False"),
    "quant_recipe": ("recipe", "None"),
    "use_kitchen": (True, "False"),
}


class TestUnsupportedConfig:
    @pytest.mark.parametrize("name", UNSUPPORTED_CONFIG)
    def test_refused(self, name):
        value, instead = UNSUPPORTED_CONFIG[name]
        assert hasattr(config_for(TINY), name)  # a field of another name would never be refused
        config = config_with(**{name: value})
        with refusal(f"{name}={value!r}", "not support", f"set it to {instead}"):
            build(config)

    @pytest.mark.parametrize("value", ["a2a", "a2a+p2p", "ring", ["p2p"], 3])
    def test_cp_comm_type(self, value):
        with refusal("cp_comm_type", "all_gather, p2p", f"got {value!r}", "one head for all"):
            build_attention(TINY, Setup(cp_comm_type=value))

    @pytest.mark.parametrize("value", [None, "all_gather", "allgather", "p2p"])
    def test_accepted_cp_comm_type(self, value):
        build_attention(TINY, Setup(cp_comm_type=value))

    def test_query_groups(self):
        config = config_with(num_query_groups=2)
        with refusal("num_query_groups", "num_attention_heads=4", "got 2"):
            build(config)

    def test_offloading(self):
        config = config_with(
            fine_grained_activation_offloading=True, offload_modules=["core_attn", "moe_act"]
        )
        parts = ("offload_modules=['core_attn']", "qkv_linear, core_attn, attn_proj")
        with refusal(*parts):
            build(config)
        config.offload_modules = ["moe_act"]  # the MLP's business
        refuse_unsupported_config(config)

    @pytest.mark.parametrize(
        "fields, parts",
        [
            ({"rope_type": "dynamic"}, ("rope_type", "rope, yarn", "'dynamic'")),
            ({"rotary_percent": 0.5}, ("rotary_percent", "1.0", "got 0.5")),
            ({"rotary_scaling_factor": 0}, ("rotary_scaling_factor", "positive", "got 0")),
            (
                {"original_max_position_embeddings": -1},
                ("original_max_position_embeddings", "positive", "got -1"),
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_rotary(self, fields, parts):
        with refusal(*parts):
            build(config_with(**fields))

    def test_norm(self):
        config = config_with(normalization="LayerNorm")
        with refusal("normalization='LayerNorm'", "RMSNorm only"):
            RMSNorm(config, 8)


class TestProjections:
    @staticmethod
    def at_tensor_parallel_size(size: int, attention, **options) -> SimpleNamespace:
        """What the projections read of an attention, as if there were ``size`` ranks."""
        groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: size))
        return SimpleNamespace(
            dims=attention.dims,
            config=attention.config,
            tp_group=attention.tp_group,
            pg_collection=groups,
            options=AbsorbedMLAOptions(**options),
            sequence_parallel=False,
        )

    def test_rows_do_not_divide(self, attention):
        owner = self.at_tensor_parallel_size(3, attention, down_projection="column_parallel")
        parts = attention_spec(attention.config, down_projection="column_parallel").submodules
        with refusal(
            "down_projection='column_parallel'",
            "16 rows of linear_q_down_proj",
            "tensor_model_parallel_size=3",
            "down_projection='duplicated'",
        ):
            ProjectionBuilder(owner, parts, None).build()

    @pytest.mark.parametrize("asked", ["duplicated", "column_parallel"])
    def test_spec_of_other_options(self, attention, asked):
        """A rank that holds a part of the rows must not take them for the whole, or vice versa."""

        class Sharded(ColumnParallelLinear):
            def __init__(self, inputs, outputs, **kwargs):
                super().__init__(inputs, outputs // 2, **kwargs)

        layer = Sharded if asked == "duplicated" else DuplicatedLinear
        found = "column_parallel" if asked == "duplicated" else "duplicated"
        owner = self.at_tensor_parallel_size(2, attention, down_projection=asked)
        parts = dataclasses.replace(
            attention_spec(attention.config).submodules, linear_q_down_proj=layer
        )
        with refusal(
            f"down_projection={asked!r}",
            f"linear_q_down_proj ({layer.__name__}) is {found}",
            "build the spec with the same options",
        ):
            ProjectionBuilder(owner, parts, None).build()
