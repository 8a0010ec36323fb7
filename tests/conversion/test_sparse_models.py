"""DeepSeek-V3.2 and GLM-5: the indexer's weights and options in every format, judged by logits.

The same tokens through transformers and, after conversion, through Megatron's own sparse attention
of local layers. Fewer keys are chosen than most tokens see, so that a wrong indexer changes the
logits by percents.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.quantizers.base import HfQuantizer

from absorbed_mla.serving.export.live import LiveCheckpoint, model_config, model_shards
from absorbed_mla.serving.export.shards import describe, gathered_tensors
from checkpoint_conversion import logits as logits_module
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.formats.legacy import as_mapped
from checkpoint_conversion.formats.torch_dist import extra_state_names
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.layouts import MegatronLayout, laid_out_tensors
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.logits import (
    checkpoint_logits,
    load_megatron_model,
    megatron_logits,
    megatron_model,
    without_mtp,
)
from checkpoint_conversion.mapping import (
    hugging_face_shapes,
    megatron_shapes,
    rows_by_name,
    to_megatron,
)
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.planning import plan_conversion
from tests.conversion.converted import loaded_logits
from tests.conversion.legacy_support import write_legacy
from tests.conversion.megatron_models import load_strictly, save_torch_dist
from tests.conversion.models import Architecture, logits_of, make_model, save, token_batch
from tests.conversion.support import (
    CONFIGS,
    assert_same_tensors,
    in_memory,
    load_all,
    random_tensors,
    read_torch_dist,
    tiny_config,
    write_hugging_face,
)
from tests.support.refusal import refusal

# Of the largest logit; float32 sums in another order stay 10 times below.
TOLERANCE, WRONG = 1e-4, 1e-2
MODELS = {
    "v32": Architecture("v32", q_lora=True, moe=True, rope="yarn"),
    "v32-dense": Architecture("v32", q_lora=True, moe=False, rope="rope"),
    "glm5": Architecture("glm5", q_lora=True, moe=True, rope="rope"),
    "glm5-dense": Architecture("glm5", q_lora=True, moe=False, rope="yarn"),
}
Tensors = dict[str, LazyTensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of transformers in a folder, and what it computes of some tokens."""

    folder: Path
    tokens: Tensor
    expected: Tensor

    def error(self, logits: Tensor) -> float:
        """Largest difference of a logit, relative to the largest one."""
        return float((logits - self.expected).abs().max() / self.expected.abs().max())

    def opened(self) -> tuple[ModelConfig, Tensors]:
        checkpoint = open_checkpoint(self.folder)
        return without_mtp(checkpoint.config, checkpoint.hugging_face_tensors())

    def converted(self, to: str) -> Path:
        target = self.folder.parent / to
        if not target.exists():
            convert(self.folder, target, to)
        return target


@pytest.fixture(scope="module", params=["v32", "glm5", "glm5-dense"])
def case(request, tmp_path_factory) -> Case:
    model, tokens = make_model(MODELS[request.param]), token_batch()
    folder = save(model, tmp_path_factory.mktemp(request.param) / "hf")
    return Case(folder, tokens, logits_of(model, tokens))


def evaluated(config: ModelConfig, tensors: Tensors, tokens: Tensor) -> Tensor:
    """Logits of Megatron's own model with these weights."""
    model = megatron_model(config, "standard")
    load_megatron_model(model, config, tensors)
    return megatron_logits(model, tokens)


class TestAgrees:
    def test_megatron(self, case):
        """Loaded by Megatron itself, and read by the tool, as ``verify`` does."""
        folder = case.converted("megatron")
        assert case.error(loaded_logits(folder, case.tokens)) < TOLERANCE
        assert case.error(checkpoint_logits(open_checkpoint(folder), case.tokens)) < TOLERANCE

    def test_absorbed_module(self, case):
        """Loaded by this package's own module, and read by the tool."""
        folder = case.converted("absorbed")
        assert case.error(loaded_logits(folder, case.tokens)) < TOLERANCE
        assert case.error(checkpoint_logits(open_checkpoint(folder), case.tokens)) < TOLERANCE

    def test_files_per_rank(self, case):
        config, tensors = case.opened()
        folder = case.folder.parent / "legacy"
        ranks = {"tensor_parallel": 2, "pipeline_parallel": 3}
        write_legacy(folder, config, load_all(tensors), **ranks)
        assert case.error(checkpoint_logits(open_checkpoint(folder), case.tokens)) < TOLERANCE

    @pytest.mark.parametrize("by", ["absorbed", "megatron"])
    def test_back_to_transformers(self, case, tmp_path, by):
        """Every bit; transformers has a place for every tensor, and computes the same."""
        convert(case.converted(by), tmp_path / "hf", "hf")
        before, after = (
            load_all(open_checkpoint(path).hugging_face_tensors())
            for path in (case.folder, tmp_path / "hf")
        )
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        model, report = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
        )
        assert not any(report.values())
        assert case.error(logits_of(model, case.tokens)) == 0


class TestControls:
    """Conversions that are wrong on purpose; each must show."""

    def test_other_rope_of_the_indexer(self, case):
        """No weight is permuted, and the option is the model's."""
        config, tensors = case.opened()
        model = megatron_model(config, "standard")
        load_megatron_model(model, config, tensors)
        options = model.config
        options.dsa_indexer_rope_interleaved = not options.dsa_indexer_rope_interleaved
        assert case.error(megatron_logits(model, case.tokens)) > WRONG

    @pytest.mark.parametrize("name", ["wq_b.weight", "k_norm.bias", "weights_proj.weight"])
    def test_a_weight_of_the_indexer(self, case, name):
        """One in reverse order."""
        config, tensors = case.opened()
        for key in tensors:
            if key.endswith(f"indexer.{name}"):
                tensors[key] = tensors[key].map(lambda weight: weight.flip(0))
        assert case.error(evaluated(config, tensors, case.tokens)) > WRONG

    def test_a_selection_of_its_own(self, tmp_path):
        """A layer that shares computes something else than one with an indexer."""
        own = make_model(MODELS["glm5"], indexer_types=["full"] * 3)
        shared = make_model(MODELS["glm5"])
        state = {k: v for k, v in own.state_dict().items() if k in shared.state_dict()}
        shared.load_state_dict(state)
        tokens = token_batch()
        case = Case(save(shared, tmp_path / "hf"), tokens, logits_of(shared, tokens))
        assert case.error(logits_of(own, tokens)) > WRONG
        config, tensors = case.opened()
        assert not any("layers.2.self_attn.indexer" in name for name in tensors)
        assert case.error(evaluated(config, tensors, tokens)) < TOLERANCE


class TestOfMegatron:
    """Names and shapes of models that Megatron builds, multi-token-prediction layers included."""

    @pytest.mark.parametrize("name", ["v32", "glm5", "shared", "dense shared"])
    def test_names_and_shapes(self, name, monkeypatch):
        config = tiny_config(**CONFIGS[name])
        found = {}

        def build(config, transformer_layer_spec, **fields):
            config.mtp_num_layers = found["mtp"]
            if found["mtp"]:
                last = transformer_layer_spec.layer_specs[-1]
                # The layer of an MTP layer is like the decoder's last one.
                mtp = get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)
                fields["mtp_block_spec"] = mtp
            return GPTModel(config, transformer_layer_spec, **fields)

        found["mtp"] = config.mtp_layers
        monkeypatch.setattr("megatron.core.models.gpt.GPTModel", build)
        model = logits_module.megatron_model(config, "standard")
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
        with logits_module.one_process():
            model = megatron_model(config, "standard")
            load_strictly(tmp_path / "ours" / "release", model, stacked=dense)
            args = to_megatron_args(config, dtype=torch.float32)
            save_torch_dist(tmp_path / "theirs", model, args, stacked=dense)
        assert_same_tensors(read_torch_dist(tmp_path / "theirs"), tensors)

    def test_norms_of_the_attention_are_modules(self, tmp_path):
        """An indexer reads their outputs, whatever the layers are."""
        config = tiny_config(**CONFIGS["v32"])
        source = write_hugging_face(tmp_path / "hf", config, random_tensors(config))
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
        config = tiny_config(**CONFIGS["dense shared"])
        source = write_hugging_face(tmp_path / "hf", config, random_tensors(config))
        with refusal(why):
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
        expected = load_all(quantised.hugging_face_tensors())
        after = read_torch_dist(tmp_path / "megatron")
        assert after.keys() == tensors.keys()
        for key, tensor in expected.items():
            assert torch.equal(after[key], tensor), key
        weights = "model.layers.1.self_attn.indexer.weights_proj.weight"
        assert after[weights].dtype == torch.float32
        assert torch.equal(after[weights], tensors[weights])
        # Powers of two: what was rounded once is rounded to the same again.
        convert(tmp_path / "megatron", tmp_path / "again", "hf", TargetOptions(fp8="ue8m0"))
        again = open_checkpoint(tmp_path / "again")
        assert found == {n for n, t in again.stored.items() if t.dtype == torch.float8_e4m3fn}
        for key, tensor in load_all(again.hugging_face_tensors()).items():
            assert torch.equal(expected[key], tensor), key

    @pytest.mark.parametrize("name", ["v32-dense", "glm5-dense"])
    def test_what_transformers_quantises(self, name):
        """The same linear layers, by what its class keeps in float32."""
        model = make_model(MODELS[name])
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

    def test_logits(self, case, tmp_path):
        """Transformers gets what the tool has dequantised, Megatron the same."""
        convert(case.folder, tmp_path / "fp8", "hf", TargetOptions(fp8="float"))
        convert(tmp_path / "fp8", tmp_path / "megatron", "megatron")
        quantised, megatron = (
            checkpoint_logits(open_checkpoint(tmp_path / name), case.tokens)
            for name in ("fp8", "megatron")
        )
        assert (quantised - megatron).abs().max() < TOLERANCE * quantised.abs().max()
        # It was rounded; how far logits go then, random selections decide.
        assert case.error(quantised) > WRONG


def test_inspection(tmp_path):
    config = tiny_config(**CONFIGS["shared"])
    inspection = inspect_checkpoint(
        write_hugging_face(tmp_path / "hf", config, random_tensors(config))
    )
    assert not inspection.problems
    assert (inspection.model["index_layers"], inspection.model["index_topk"]) == (3, 6)


def test_a_shared_layer_with_an_indexer_is_refused(tmp_path):
    config = tiny_config(**CONFIGS["shared"])
    tensors = random_tensors(config)
    name = "model.layers.{}.self_attn.indexer.wk.weight"
    tensors[name.format(2)] = tensors[name.format(1)].clone()
    source = write_hugging_face(tmp_path / "hf", config, tensors)
    with refusal("do not fit the model", name.format(2), "is unknown"):
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
        with logits_module.one_process():
            model = megatron_model(config, "standard")
            load_megatron_model(model, config, in_memory(tensors))
            shards = model_shards([model])
            found = model_config(model, None, (None, None))
            device = torch.device("cpu")
            told = [[describe(shard) for shard in shards]]
            live = LiveCheckpoint(gathered_tensors(told, shards, device), found)
            parts = plan_conversion(live, "hf", TargetOptions()).parts
            written = [entry for part in parts for entry in part.entries]
            assert found.indexer == config.indexer
            assert [entry.key for entry in written] == list(hugging_face_shapes(config))
            for entry in written:
                (value,) = load_all({entry.key: entry.tensor}).values()
                assert torch.equal(value, tensors[entry.key]), entry.key
