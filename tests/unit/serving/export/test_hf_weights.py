"""Weights of a live model in one process, against saving it and converting the checkpoint."""

from __future__ import annotations

import json
import weakref
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

import absorbed_mla.serving.export.live as live
from absorbed_mla.checkpoint.distributed import save_model_weights
from absorbed_mla.serving.export import LiveWeights, hf_weight_shapes, hf_weights
from checkpoint_conversion import logits
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.hugging_face import HuggingFaceCheckpoint
from checkpoint_conversion.mapping import hugging_face_shapes
from checkpoint_conversion.megatron_args import router_options, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.rotary import LAYER_OPTIONS
from tests.conversion.megatron_models import SAME, megatron_model, save_torch_dist
from tests.conversion.support import AXK1, MINICPM3, MISTRAL4, load_all, tiny_config
from tests.support.adapters import wrap
from tests.support.memory import PeakMemory
from tests.support.refusal import refusal

SILU = {"activation_func": torch.nn.functional.silu}
MODELS = {
    "mixed": {},
    "dense": {"first_k_dense_replace": 3},
    "all_moe": {"first_k_dense_replace": 0},
    "mtp": {"num_nextn_predict_layers": 1},
    "tied": {"tie_word_embeddings": True},
    "no_q_lora": {"q_lora_rank": None},
}
OPTIONS = {
    "plain": (TargetOptions(), {}),
    "bfloat16": (TargetOptions(dtype=torch.bfloat16), {"dtype": torch.bfloat16}),
    "fp8": (TargetOptions(fp8="float"), {"fp8": True}),
    "fp8_ue8m0": (
        TargetOptions(dtype=torch.bfloat16, fp8="ue8m0"),
        {"dtype": torch.bfloat16, "fp8": "ue8m0"},
    ),
}


def made(kind: str = "absorbed", config: ModelConfig | None = None, **changes) -> GPTModel:
    """A model of random weights."""
    config = config or tiny_config(**SAME)
    changes = {"q_lora_rank": config.q_lora_rank, **SILU, **changes}
    return megatron_model(config, kind, **changes)


def converted(folder: Path) -> dict[str, Tensor]:
    """What a Hugging Face folder stores, in the order of its index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = load_all(HuggingFaceCheckpoint(folder).stored)
    return {name: stored[name] for name in index["weight_map"]}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names in the same order, same dtypes, shapes and bits."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name
        assert found[name].is_contiguous(), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class TestEqualToTheConverter:
    @pytest.mark.parametrize("name", MODELS)
    def test_models(self, name, tmp_path):
        """Saved with the arguments of a training, converted, compared with all options."""
        config = tiny_config(**SAME, **MODELS[name])
        model = made(config=config)
        args = to_megatron_args(config, dtype=torch.float32)
        save_torch_dist(tmp_path / "saved", model, args)
        chosen = OPTIONS if name == "mtp" else {"plain": OPTIONS["plain"]}
        for label, (options, asked) in chosen.items():
            convert(tmp_path / "saved", tmp_path / label, "hf", options, workers=1)
            assert_equal(dict(hf_weights(model, **asked)), converted(tmp_path / label))

    def test_order_is_that_of_the_table(self):
        config = tiny_config(**SAME, **MODELS["mtp"])
        assert list(dict(hf_weights(made(config=config)))) == list(hugging_face_shapes(config))

    def test_names_of_transformer_engine(self, monkeypatch, tmp_path):
        """The norms that its layers fuse have other names, as in its checkpoints."""
        model = made()
        expected = dict(hf_weights(model))
        keys = []

        def renamed(chunk):
            """What save_model_weights would write with Transformer Engine's names."""
            with monkeypatch.context() as patch:
                patch.setattr(
                    "megatron.core.dist_checkpointing.save", lambda state, _: keys.append(state)
                )
                save_model_weights(chunk, tmp_path, norm_names="transformer_engine")
            return keys[-1]

        monkeypatch.setattr(live, "model_sharded_state_dict", renamed)
        assert_equal(dict(hf_weights(model)), expected)
        names = {entry.key for entry in keys[-1].values()}
        assert any(name.endswith("linear_fc1.layer_norm_weight") for name in names)

    def test_fused_down_projections(self):
        """mla_down_proj_fusion changes no weight's name outside of the live model."""
        separate, fused = made(), made(mla_down_proj_fusion=True)
        fused.load_state_dict(separate.state_dict())
        assert hasattr(fused.decoder.layers[0].self_attention, "linear_qkv_down_proj")
        assert_equal(dict(hf_weights(fused)), dict(hf_weights(separate)))

    def test_padding_of_the_vocabulary(self):
        model, config = made(), tiny_config(**SAME, vocab_size=50)
        expected = dict(hf_weights(model))
        found = dict(hf_weights(model, hf_config=config.hugging_face))
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            expected[name] = expected[name][:50]
        assert_equal(found, expected)

    def test_config_that_announces_layers_the_model_lacks(self):
        """A training may leave out the MTP layers of the config.json that it began with."""
        model, config = made(), tiny_config(**SAME, num_nextn_predict_layers=1)
        assert_equal(
            dict(hf_weights(model, hf_config=config.hugging_face)), dict(hf_weights(model))
        )

    def test_config_json(self, tmp_path):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(tiny_config(**SAME).hugging_face))
        model = made()
        assert_equal(dict(hf_weights(model, hf_config=path)), dict(hf_weights(model)))


class TestRouter:
    """Of the layers' options, which no field of Megatron's config holds."""

    CONFIG = tiny_config(
        intermediate_size=64,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
    )

    def model(self) -> tuple[GPTModel, Namespace]:
        args = to_megatron_args(self.CONFIG, dtype=torch.float32)
        return logits.megatron_model(self.CONFIG, "absorbed"), args

    def options(self, *chunks: GPTModel) -> dict[str, object]:
        return live.one_of_each([live.layer_options(chunks)])

    def test_in_the_config(self):
        model, args = self.model()
        found = live.model_config(model, None, self.options(model)).hugging_face
        assert (found["norm_topk_prob"], found["n_group"], found["topk_group"]) == (False, 4, 2)
        assert "moe_router_group_score_topk" not in found, "two, as of every DeepSeek-V3"
        back = to_megatron_args(ModelConfig.from_hugging_face(found))
        assert router_options(back) == router_options(args)
        assert router_options(args) == {
            "moe_router_group_score_topk": 2,
            "moe_router_norm_topk_prob": False,
        }

    def test_of_megatron_alone(self):
        model = made(moe_router_score_function="softmax", moe_router_enable_expert_bias=False)
        with refusal("moe_router_norm_topk_prob is True: no model of Hugging Face's routes so"):
            hf_weights(model)

    def test_of_another_config(self):
        model, _ = self.model()
        hf_weights(model, hf_config=self.CONFIG.hugging_face)
        fields = {**self.CONFIG.hugging_face, "norm_topk_prob": True}
        with refusal("hf_config", "another router", "norm_topk_prob is True, in the model False"):
            hf_weights(model, hf_config=fields)

    def test_a_chunk_without_layers(self):
        """Such as the first of the layout E|tt|L: others say what the router is."""
        model, args = self.model()
        first = made(stage=(True, False))
        first.decoder.layers = nn.ModuleList()
        assert live.layer_options([first]) == set()
        expected = router_options(args) | dict.fromkeys(LAYER_OPTIONS)
        expected["post_mlp_layernorm"] = False
        assert self.options(first, model) == expected
        found = set(expected.items())
        assert live.one_of_each([set(), found, found]) == expected
        assert live.one_of_each([set()]) == dict.fromkeys(expected)

    def test_layers_that_differ(self):
        model, _ = self.model()
        attention = model.decoder.layers[-1].self_attention
        attention.options = attention.options.replace(moe_router_norm_topk_prob=True)
        with refusal("all layers", "have one", "moe_router_norm_topk_prob", "got False, True"):
            hf_weights(model)


def test_scaling_of_queries(tmp_path):
    """It is in the config.json, without which the weights are those of another model type."""
    config = tiny_config(**MISTRAL4)
    model = logits.megatron_model(config, "absorbed")
    options = live.one_of_each([live.layer_options([model])])
    found = live.model_config(model, None, options).hugging_face
    assert (found["model_type"], found["rope_parameters"]["llama_4_scaling_beta"]) == (
        "mistral4",
        0.1,
    )
    save_torch_dist(tmp_path / "saved", model, to_megatron_args(config, dtype=torch.float32))
    convert(tmp_path / "saved", tmp_path / "hf", "hf", workers=1)
    assert_equal(dict(hf_weights(model)), converted(tmp_path / "hf"))
    assert (
        json.loads((tmp_path / "hf/config.json").read_text())["rope_parameters"]
        == (found["rope_parameters"])
    )
    rope = {**found["rope_parameters"], "llama_4_scaling_beta": 0.2}
    with refusal("scaling of queries", "llama_4_scaling_beta is 0.2, in the model 0.1"):
        hf_weights(model, hf_config={**found, "rope_parameters": rope})
    attention = model.decoder.layers[0].self_attention
    attention.options = attention.options.replace(llama_4_scaling_beta=None)
    with refusal("all layers", "llama_4_scaling_beta", "got 0.1, None"):
        hf_weights(model)


def test_minicpm3(tmp_path):
    """Rotary channels are halves again, and what is scaled is in config.json."""
    config = tiny_config(**MINICPM3)
    model = logits.megatron_model(config, "absorbed")
    save_torch_dist(tmp_path / "saved", model, to_megatron_args(config, dtype=torch.float32))
    convert(tmp_path / "saved", tmp_path / "hf", "hf", workers=1)
    assert_equal(dict(hf_weights(model)), converted(tmp_path / "hf"))
    assert_equal(dict(hf_weights(model, hf_config=config.hugging_face)), converted(tmp_path / "hf"))
    with refusal("scaling of queries", "mup_embedding_mult is", "in the model"):
        hf_weights(model, hf_config={**config.hugging_face, "scale_emb": 6})


def test_norm_of_experts():
    """It is in the weights, and makes another model type of them."""
    config = tiny_config(**{**AXK1, "num_nextn_predict_layers": 0})
    model = logits.megatron_model(config, "absorbed")
    assert dict(hf_weights(model)).keys() == hugging_face_shapes(config).keys()


class TestValues:
    def test_of_this_moment_and_in_memory_of_their_own(self):
        model = made()
        before = dict(hf_weights(model))
        kept = {name: tensor.clone() for name, tensor in before.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        assert_equal(before, kept)
        after = dict(hf_weights(model))
        moved = [name for name in kept if not torch.equal(after[name], kept[name])]
        assert moved == [name for name in kept if "correction_bias" not in name]

    def test_of_weights_that_moved_or_were_replaced(self):
        """One object gives them all, and keeps no memory that the model has left."""
        model = made()
        weights = LiveWeights(model)
        assert_equal(dict(weights), dict(hf_weights(model)))
        left = []
        with torch.no_grad():
            for number, weight in enumerate(model.parameters()):
                left.append(weakref.ref(weight.untyped_storage()))
                weight.data = torch.full_like(weight, number)
        assert not any(one() for one in left)
        assert_equal(dict(weights), dict(hf_weights(model)))
        attention = model.decoder.layers[0].self_attention
        attention.linear_proj.weight = nn.Parameter(-attention.linear_proj.weight.detach())
        assert_equal(dict(weights), dict(hf_weights(model)))

    @pytest.mark.parametrize("asked", [{}, {"fp8": True}], ids=str)
    def test_shapes_before_the_values(self, asked):
        model = made()
        found = [(name, t.dtype, tuple(t.shape)) for name, t in hf_weights(model, **asked)]
        assert hf_weight_shapes(model, **asked) == found

    def test_no_gradients(self):
        assert not any(tensor.requires_grad for _, tensor in hf_weights(made()))

    @pytest.mark.parametrize("wrap", ["float16", "list", "twice"])
    def test_what_training_wraps_around_it(self, wrap):
        model = made(bf16=True)
        wrapped = [model] if wrap == "list" else Float16Module(model.config, model)
        if wrap == "twice":  # as in DDP
            wrapped = nn.DataParallel(wrapped)
        found = dict(hf_weights(wrapped))
        assert_equal(found, dict(hf_weights(model)))
        dtype = torch.float32 if wrap == "list" else torch.bfloat16
        assert found["lm_head.weight"].dtype == dtype

    @pytest.mark.parametrize("asked", [{}, {"fp8": True}, {"dtype": torch.bfloat16}], ids=str)
    def test_memory(self, asked):
        """Of any number of layers: one tensor, what it is made of, and a slab of its FP8 blocks."""
        peaks, totals = [], []
        for layers in (2, 8):
            model = made(config=tiny_config(**SAME, num_hidden_layers=layers))
            largest = max(tensor.nbytes for _, tensor in hf_weights(model))
            # The call exchanges names and shapes, not weights.
            weights = hf_weights(model, **asked)
            with PeakMemory() as memory:
                for _, tensor in weights:
                    del tensor
            peaks.append(memory.peak)
            totals.append(sum(p.nbytes for p in model.parameters()))
        assert peaks[0] == peaks[1]
        slab = 64 * 128 * 16 if asked.get("fp8") else 0
        assert largest / 2 <= peaks[1] <= 3 * largest + slab
        assert peaks[1] - slab < totals[1] / 10


class TestRefused:
    @pytest.fixture(autouse=True)
    def nothing_is_sent(self, monkeypatch):
        """But the error, to ranks that wait for this one."""

        def never(*args, **kwargs):
            raise AssertionError("collective")

        for name in ("broadcast", "all_reduce"):
            monkeypatch.setattr(dist, name, never)

    def test_standard_attention(self):
        with refusal("model", "AbsorbedMLASelfAttention", "decoder.layers.0", "MLASelfAttention"):
            hf_weights(made("standard"))

    def test_no_model(self):
        with refusal("model", "GPTModel", "got Linear"):
            hf_weights(nn.Linear(2, 2))
        with refusal("model", "GPTModel", "empty list"):
            hf_weights([])

    @pytest.mark.parametrize("described", [False, True], ids=["config", "hf_config"])
    def test_model_that_no_table_knows(self, described):
        """Messages name fields of the config, which are what the program can change."""
        other = {"activation_func": nn.functional.gelu, "gated_linear_unit": False}
        model = made(**other, qk_layernorm=False)
        options = {"hf_config": tiny_config(**SAME).hugging_face} if described else {}
        with refusal(
            "config.gated_linear_unit must be True, got False",
            "config.activation_func must be torch.nn.functional.silu, got gelu",
            "config.qk_layernorm must be True, got False",
        ):
            hf_weights(model, **options)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"activation_func": nn.functional.gelu}, "config.activation_func must be"),
            ({"gated_linear_unit": False}, "config.gated_linear_unit must be True"),
        ],
        ids=["gelu", "not gated"],
    )
    def test_half_of_swiglu(self, changes, message):
        with refusal(message):
            hf_weights(made(**changes))

    def test_config_that_is_none(self):
        with refusal("model_type", "'llama'"):
            hf_weights(made(), hf_config={"model_type": "llama"})

    def test_config_that_is_not_there(self, tmp_path):
        with refusal("config.json"):
            hf_weights(made(), hf_config=tmp_path / "config.json")

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"dtype": torch.int8}, ("dtype", "bfloat16, float16, float32", "got torch.int8")),
            ({"fp8": "e5m2"}, ("fp8", "'float', 'ue8m0'", "got 'e5m2'")),
        ],
        ids=["dtype", "fp8"],
    )
    def test_options(self, options, parts):
        with refusal(*parts):
            hf_weights(made(), **options)

    def test_weights_that_are_no_plain_tensors(self):
        class Other(torch.Tensor):
            pass

        model = made()
        weight = model.decoder.layers[0].self_attention.linear_q_down_proj
        del weight.weight
        weight.register_buffer("weight", torch.zeros(16, 32).as_subclass(Other))
        with refusal("linear_q_down_proj.weight is a Other", "plain tensors"):
            hf_weights(model)


def test_config_of_another_model_is_refused_at_the_call():
    """By names and shapes, which takes what the other ranks hold."""
    with refusal("decoder.layers.2.", "is unknown"):
        hf_weights(made(), hf_config=tiny_config(**SAME, num_hidden_layers=2).hugging_face)
    with refusal("linear_kv_down_proj.weight has shape (32, 32); expected (40, 32)"):
        hf_weights(made(), hf_config=tiny_config(**SAME, kv_lora_rank=32).hugging_face)


@pytest.mark.parametrize("name", ["linear_q_up_proj", "linear_kv_down_proj"])
def test_layers_that_an_adapter_wraps(name):
    model = made()
    wrap(model.decoder.layers[0].self_attention, name)
    with pytest.raises(CheckpointError, match=f"{name}.to_wrap.weight"):
        [*hf_weights(model)]
