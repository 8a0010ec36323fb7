"""DeepSeek-V3.2 and GLM-5: the indexer's weights and options, against Megatron's own models.

Their logits are compared in ``test_logits.py``.
"""

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.experimental_attention_variant.dsa import is_dsa_skip_topk_layer
from transformers import FineGrainedFP8Config, GlmMoeDsaConfig
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import HfQuantizer

from absorbed_mla.serving.export.live import LiveCheckpoint, model_config, model_shards
from absorbed_mla.serving.export.shards import describe, gathered_tensors, own_shards
from absorbed_mla.serving.export.weights import weights_of
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.formats.torch_dist import extra_state_names
from checkpoint_conversion.indexer import Indexer, schedule_of
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.logits import load_megatron_model, megatron_model, one_process
from checkpoint_conversion.mapping import (
    hugging_face_shapes,
    megatron_shapes,
    rows_by_name,
    to_megatron,
)
from checkpoint_conversion.megatron_args import from_megatron_args, to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.planning import plan_conversion
from tests.conversion.megatron_models import load_strictly, save_torch_dist
from tests.conversion.models import SPARSE, make_model
from tests.conversion.released import DEEPSEEK_V32, GLM_5, GLM_52
from tests.conversion.support import (
    CONFIGS,
    GLM5,
    SHARED,
    assert_same_tensors,
    in_memory,
    load_all,
    random_tensors,
    read,
    refused,
    tiny_config,
    write_hugging_face,
    write_model,
)


class TestOfMegatron:
    """Names and shapes of models that Megatron builds, multi-token-prediction layers included."""

    @pytest.mark.parametrize("name", ["v32", "glm5", "shared", "dense shared"])
    def test_names_and_shapes(self, name, monkeypatch):
        config = tiny_config(**CONFIGS[name])
        mtp_layers = config.mtp_layers

        def build(config, transformer_layer_spec, **fields):
            config.mtp_num_layers = mtp_layers
            if mtp_layers:
                last = transformer_layer_spec.layer_specs[-1]
                # The layer of an MTP layer is like the decoder's last one.
                mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)
                fields["mtp_block_spec"] = mtp
            return GPTModel(config, transformer_layer_spec, **fields)

        monkeypatch.setattr("megatron.core.models.gpt.GPTModel", build)
        model = megatron_model(config, "standard")
        state = {as_mapped(name): t for name, t in model.state_dict().items() if t is not None}
        assert {n: tuple(t.shape) for n, t in state.items()} == megatron_shapes(config)

    @pytest.mark.parametrize("name", ["v32", "glm5", "shared", "v32 dense"])
    def test_saved_and_loaded_by_megatron(self, tmp_path, name):
        """A checkpoint of its own is read; one of ours it loads with nothing missing or left."""
        changes = {**CONFIGS[name.split()[0]], "num_nextn_predict_layers": 0}
        dense = "dense" in name
        if dense:
            # All layers are alike: Megatron stores them as one tensor.
            changes["first_k_dense_replace"] = 3
        config = tiny_config(**changes)
        tensors = random_tensors(config, torch.float32)
        source = write_hugging_face(tmp_path / "hf", config, tensors)
        convert(source, tmp_path / "ours", "megatron", TargetOptions(norms="separate"))
        with one_process():
            model = megatron_model(config, "standard")
            load_strictly(tmp_path / "ours" / "release", model, stacked=dense)
            args = to_megatron_args(config, dtype=torch.float32)
            save_torch_dist(tmp_path / "theirs", model, args, stacked=dense)
        assert_same_tensors(read(tmp_path / "theirs"), tensors)

    def test_norms_of_the_attention_are_modules(self, tmp_path):
        """An indexer reads their outputs, whatever the layers are."""
        source = write_model(tmp_path / "hf", **CONFIGS["v32"])
        convert(source, tmp_path / "megatron", "megatron", TargetOptions(norms="fused"))
        names = set(open_checkpoint(tmp_path / "megatron").stored)
        layer = "decoder.layers.0."
        for norm in ("q_layernorm", "kv_layernorm"):
            assert f"{layer}self_attention.{norm}.weight" in names
        assert f"{layer}mlp.linear_fc1.layer_norm_weight" in names
        assert not any("up_proj.layer_norm_weight" in name for name in names)

    def test_states_of_transformer_engines_modules(self):
        """Its norms and linear layers load one each, the indexer's included."""
        config = tiny_config(**CONFIGS["shared"])
        tensors = to_megatron(in_memory(random_tensors(config)), config)
        names = laid_out_tensors(tensors, MegatronLayout(norms="fused"), config)
        states = extra_state_names(names, "fused", False, config)
        assert len(set(states)) == len(states)
        modules = {name.partition("._extra_state")[0] for name in states}
        linear = ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj")
        layers = [f"decoder.layers.{n}" for n in (0, 1, 4)] + ["mtp.layers.0.transformer_layer"]
        assert {module for module in modules if "core_attention" in module} == {
            f"{layer}.self_attention.core_attention.indexer.{name}"
            for layer in layers
            for name in linear
        }
        norms = {module for module in modules if module.startswith("decoder.layers.2.")}
        assert "decoder.layers.2.self_attention.q_layernorm" in norms

    @pytest.mark.parametrize(
        ("options", "why"),
        [({"down": "fused"}, "--down fused"), ({"layers": "stacked"}, "without an indexer")],
    )
    def test_layouts_that_it_has_not(self, tmp_path, options, why):
        source = write_model(tmp_path / "hf", **CONFIGS["dense shared"])
        with refused(why):
            convert(source, tmp_path / "out", "megatron", TargetOptions(**options))


class TestQuantised:
    """FP8 blocks as in the released checkpoints: wq_b and wk, not weights_proj."""

    @pytest.mark.parametrize("name", ["v32", "shared"])
    def test_there_and_back(self, tmp_path, name):
        config = tiny_config(**CONFIGS[name])
        tensors = random_tensors(config)
        source = write_hugging_face(tmp_path / "hf", config, tensors)
        convert(source, tmp_path / "fp8", "hf", TargetOptions(fp8="ue8m0"))
        quantised = open_checkpoint(tmp_path / "fp8")
        found = {name for name, t in quantised.stored.items() if t.dtype == torch.float8_e4m3fn}
        indexer = {name.rpartition("indexer.")[2] for name in found if "indexer" in name}
        assert indexer == {"wq_b.weight", "wk.weight"}
        mtp = f"model.layers.{config.num_layers}.self_attn."
        assert {f"{mtp}indexer.wk.weight", f"{mtp}o_proj.weight"} <= found
        convert(tmp_path / "fp8", tmp_path / "megatron", "megatron")
        expected, after = read(tmp_path / "fp8"), read(tmp_path / "megatron")
        assert after.keys() == tensors.keys()
        assert_same_tensors(after, expected)
        weights = "model.layers.1.self_attn.indexer.weights_proj.weight"
        assert after[weights].dtype == torch.float32
        assert torch.equal(after[weights], tensors[weights])
        # Powers of two: what was rounded once is rounded to the same again.
        convert(tmp_path / "megatron", tmp_path / "again", "hf", TargetOptions(fp8="ue8m0"))
        again = open_checkpoint(tmp_path / "again")
        assert found == {n for n, t in again.stored.items() if t.dtype == torch.float8_e4m3fn}
        assert_same_tensors(read(tmp_path / "again"), expected)

    @pytest.mark.parametrize("name", ["v32-dense", "glm5-dense"])
    def test_what_transformers_quantises(self, name):
        """The same linear layers, by what its class keeps in float32."""
        model = make_model(SPARSE[name])
        linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        kept = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
        replace_with_fp8_linear(
            model, modules_to_not_convert=kept, quantization_config=FineGrainedFP8Config()
        )
        found = {n for n, m in model.named_modules() if type(m).__name__ == "FP8Linear"}
        config = ModelConfig.from_hugging_face(model.config.to_dict())
        rows = rows_by_name(config)
        assert found == {name for name in linear if rows[f"{name}.weight"].fp8}
        assert any("indexer" in name for name in linear - found)


def test_inspection(tmp_path):
    inspection = inspect_checkpoint(write_model(tmp_path / "hf", **CONFIGS["shared"]))
    assert not inspection.problems
    assert (inspection.model["index_layers"], inspection.model["index_topk"]) == (3, 6)


def test_a_shared_layer_with_an_indexer_is_refused(tmp_path):
    config = tiny_config(**CONFIGS["shared"])
    tensors = random_tensors(config)
    name = "model.layers.{}.self_attn.indexer.wk.weight"
    tensors[name.format(2)] = tensors[name.format(1)].clone()
    source = write_hugging_face(tmp_path / "hf", config, tensors)
    with refused("do not fit the model", name.format(2), "is unknown"):
        convert(source, tmp_path / "out", "absorbed")


def test_arguments_of_the_model():
    args = vars(to_megatron_args(tiny_config(**CONFIGS["shared"])))
    options = {k: v for k, v in args.items() if k.startswith(("dsa", "experimental"))}
    assert options == {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": 6,
        "dsa_indexer_topk_freq": 3,
        "dsa_indexer_skip_topk_offset": 2,
        "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_scoring_relu": True,
        "dsa_indexer_k_norm_epsilon": 1e-6,
    }


class TestLiveModel:
    """What ``hf_weights`` does with the shards of a model; here one of Megatron's own attention."""

    @pytest.mark.parametrize("name", ["v32", "shared", "dense shared"])
    def test_names_and_values(self, name):
        config = tiny_config(**{**CONFIGS[name], "num_nextn_predict_layers": 0})
        tensors = random_tensors(config, torch.float32)
        with one_process():
            model = megatron_model(config, "standard")
            load_megatron_model(model, config, in_memory(tensors))
            shards = model_shards([model])
            found = model_config(model, None, {})
            device = torch.device("cpu")
            told = [[describe(shard) for shard in shards]]
            held = own_shards(shards, weights_of([model]))
            live = LiveCheckpoint(gathered_tensors(told, held, device), found)
            parts = plan_conversion(live, "hf", TargetOptions()).parts
            written = [entry for part in parts for entry in part.entries]
            assert found.indexer == config.indexer
            assert [entry.key for entry in written] == list(hugging_face_shapes(config))
            for entry in written:
                (value,) = load_all({entry.key: entry.tensor}).values()
                assert torch.equal(value, tensors[entry.key]), entry.key


def test_released_models():
    v32, glm5, glm52 = map(ModelConfig.from_hugging_face, (DEEPSEEK_V32, GLM_5, GLM_52))
    assert v32.indexer == Indexer(heads=64, width=128, topk=2048)
    assert v32.mtp_layers == 1 and "ue8m0 scales" in v32.quantisation
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
