"""Model types: declarations, text models of images, stacked experts, one file for a new one."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import checkpoint_conversion.models
from checkpoint_conversion.cli import DONE, main
from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.logits import checkpoint_logits
from checkpoint_conversion.mapping_table import LAYER, MODEL, MTP, MTP_DUPLICATES
from checkpoint_conversion.model import ModelConfig, read_function
from checkpoint_conversion.model_type import MODELS, convertible, of_arguments
from checkpoint_conversion.verify import verify
from tests.conversion.models import KIMI_K25, OTHERS, logits_of, make_model, save, token_batch
from tests.conversion.support import (
    assert_same_tensors,
    change_json,
    hugging_face_config,
    load_all,
    random_tensors,
    refused,
    tiny_config,
    write_hugging_face,
)

TABLE = {row.hugging_face for row in (*MODEL, *LAYER, *MTP)} | MTP_DUPLICATES.keys()


class TestDeclarations:
    """What the files of ``checkpoint_conversion/models`` say."""

    @pytest.mark.parametrize("model", convertible().values(), ids=lambda model: model.name)
    def test_names_are_those_of_the_table(self, model):
        assert {*model.tensors, *model.stacks.values()} <= TABLE
        for name, own in model.tensors.items():
            assert name.count("|") == own.count("|") and ("{expert}" in name) == ("{expert}" in own)
        assert "{layer}" in model.layer

    @pytest.mark.parametrize(
        ("scores", "interleaved", "scaled", "normed"),
        [
            *itertools.product(("sigmoid", "softmax"), (None, False, True), (False,), (False,)),
            ("softmax", None, True, False),
            ("sigmoid", None, False, True),
        ],
    )
    def test_arguments_become_one_model_type(self, scores, interleaved, scaled, normed):
        """Another file cannot change which one, unless it asks for it."""
        model = of_arguments(scores, interleaved, scaled, normed)
        same = [
            other.name
            for other in convertible().values()
            if other.from_arguments
            and (other.scales_queries, other.post_mlp_layernorm) == (scaled, normed)
            and (other.sparse and other.sparse.interleaved) == interleaved
            and (other.scoring_func == model.scoring_func)
        ]
        assert same == [model.name]
        assert model.scoring_func == (scores if interleaved is None else "sigmoid")


class TestModelsOfImages:
    @pytest.mark.parametrize("config", ["whole", "text"])
    def test_what_a_text_model_leaves_out_is_said(self, config, tmp_path):
        """Whether config.json is that of the whole model or of its text model."""
        folder = save(make_model(KIMI_K25), tmp_path / "hf")
        if config == "text":
            whole = json.loads((folder / "config.json").read_text())
            text = whole["text_config"] | {"model_type": "deepseek_v3"}
            (folder / "config.json").write_text(json.dumps(text))
        inspection = inspect_checkpoint(folder)
        assert not inspection.problems
        names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
        images = [name for name in names if not name.startswith("language_model.")]
        assert inspection.left_alone.tensors == len(images) > 20
        assert f"{len(images)} tensors for images" in " ".join(inspection.notes)
        report = convert(folder, tmp_path / "absorbed", "absorbed")
        assert set(report.plan.left_out) == set(images)


class TestStackedExperts:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        return save(make_model(OTHERS["mistral4"]), tmp_path / "hf")

    def test_no_stack_of_the_model(self, folder, tmp_path):
        change_json(folder / "config.json", n_routed_experts=4)
        with refused("do not fit the model", "mlp.experts.gate_up_proj of shape (8, 64, 64)"):
            convert(folder, tmp_path / "out", "absorbed")

    def test_are_not_quantised(self, folder, tmp_path):
        with refused("--fp8 float", "mistral4 stores its experts as one tensor"):
            convert(folder, tmp_path / "out", "hf", TargetOptions(fp8="float"))


FOO = """
from dataclasses import replace

from checkpoint_conversion.model_type import FixedValue
from checkpoint_conversion.models.deepseek_v3 import ENTRY as DEEPSEEK_V3

ENTRY = replace(
    DEEPSEEK_V3,
    name="foo_v3",
    summary="whole",
    released=("Foo-V3",),
    architectures=("FooV3ForCausalLM",),
    fields={
        "num_hidden_layers": "depth",
        "n_routed_experts": "num_experts",
        "num_nextn_predict_layers": "mtp_depth",
    },
    defaults={**DEEPSEEK_V3.defaults, "routed_scaling_factor": 7.5, "first_k_dense_replace": 1},
    only={"value_gate": FixedValue(False, "Megatron has none"), "rope_scaling.bias": FixedValue(0)},
    layer="transformer.blocks.{layer}.",
    tensors={
        "model.embed_tokens.weight": "transformer.wte.weight",
        "lm_head.weight": "output.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attn.kv_a.weight",
        "self_attn.kv_b_proj.weight": "attn.kv_b.weight",
        "self_attn.o_proj.weight": "attn.dense.weight",
        "mlp.[gate|up]_proj.weight": "ffn.[w1|w3].weight",
        "mlp.down_proj.weight": "ffn.w2.weight",
        "mlp.gate.e_score_correction_bias": "moe.bias",
        "mlp.experts.{expert}.[gate|up]_proj.weight": "moe.{expert}.[w1|w3].weight",
        "mlp.experts.{expert}.down_proj.weight": "moe.{expert}.w2.weight",
        "enorm.weight": "mtp.enorm.weight",
        "embed_tokens.weight": "mtp.wte.weight",
    },
)
"""
# The same names once more, apart from the declaration.
_RENAMED = [
    (r"^model\.embed_tokens", "transformer.wte"),
    (r"^lm_head", "output"),
    (r"^model\.layers\.", "transformer.blocks."),
    (r"\.self_attn\.kv_(a|b)_proj(_with_mqa)?\.", r".attn.kv_\1."),
    (r"\.self_attn\.o_proj\.", ".attn.dense."),
    (r"\.mlp\.gate\.e_score_correction_bias", ".moe.bias"),
    (r"\.mlp\.experts\.(\d+)", r".moe.\1"),
    (r"\.mlp\.(gate|up|down)_proj", r".ffn.\1_proj"),
    (r"\.(moe\.\d+|ffn)\.gate_proj", r".\1.w1"),
    (r"\.(moe\.\d+|ffn)\.up_proj", r".\1.w3"),
    (r"\.(moe\.\d+|ffn)\.down_proj", r".\1.w2"),
    (r"(\d)\.enorm", r"\1.mtp.enorm"),
    (r"(\d)\.embed_tokens", r"\1.mtp.wte"),
]
_FIELDS = {
    "num_hidden_layers": "depth",
    "n_routed_experts": "num_experts",
    "num_nextn_predict_layers": "mtp_depth",
}


def foo_name(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def foo_config(**changes) -> dict:
    """The tiny DeepSeek-V3 of the other tests as a ``foo_v3``."""
    fields = hugging_face_config(num_nextn_predict_layers=1, **changes)
    fields |= {"model_type": "foo_v3", "architectures": ["FooV3ForCausalLM"]}
    return {_FIELDS.get(name, name): value for name, value in fields.items()}


@pytest.fixture
def foo_v3(tmp_path, monkeypatch):
    """One file beside the others, as its author would put it there."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "foo_v3.py").write_text(FOO)
    path = checkpoint_conversion.models.__path__
    path.append(str(folder))
    monkeypatch.delitem(vars(MODELS), "_files", raising=False)
    yield
    path.remove(str(folder))
    vars(MODELS).pop("_files", None)


def write_both(tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoint of a ``foo_v3``, and that of the DeepSeek-V3 with the same values."""
    deepseek = tiny_config(num_nextn_predict_layers=1)
    tensors = random_tensors(deepseek)
    config = ModelConfig.from_hugging_face(foo_config())
    renamed = {foo_name(name): tensor for name, tensor in tensors.items()}
    assert sum(a != b for a, b in zip(renamed, tensors)) > 50
    foo = write_hugging_face(tmp_path / "foo", config, renamed)
    return foo, write_hugging_face(tmp_path / "deepseek", deepseek, tensors)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_all(dict(open_checkpoint(folder).stored))


class TestNewModelType:
    """A fictitious model type with other names of fields and tensors."""

    @pytest.mark.parametrize("to", ["megatron", "absorbed"])
    def test_both_ways(self, foo_v3, tmp_path, to, capsys):
        """Megatron's weights are those of the same DeepSeek-V3, and every bit comes back."""
        foo, deepseek = write_both(tmp_path)
        assert main(["convert", str(foo), str(tmp_path / "there"), "--to", to]) == DONE
        convert(deepseek, tmp_path / "same", to)
        assert_same_tensors(stored(tmp_path / "there"), stored(tmp_path / "same"))
        assert main(["convert", str(tmp_path / "there"), str(tmp_path / "back"), "--to", "hf"]) == 0
        assert_same_tensors(stored(tmp_path / "back"), stored(foo))
        fields = [
            json.loads((folder / "config.json").read_text()) for folder in (foo, tmp_path / "back")
        ]
        assert fields[0] == fields[1]
        verify = ["verify", str(foo), str(tmp_path / "there"), "--no-logits", "--json"]
        capsys.readouterr()
        assert main(verify) == DONE and json.loads(capsys.readouterr().out)["equal"]

    def test_fields(self, foo_v3):
        config = ModelConfig.from_hugging_face(foo_config(routed_scaling_factor=None))
        assert (config.num_layers, config.num_experts, config.mtp_layers) == (3, 4, 1)
        assert config.fields.number("routed_scaling_factor", 0.0, 9.0) == 7.5
        assert config.with_mtp_layers(0).hugging_face["mtp_depth"] == 0

    def test_fp8_and_dtype(self, foo_v3, tmp_path):
        """The same weights are quantised, or kept in their dtype, as in DeepSeek-V3."""
        folders = write_both(tmp_path)
        for options in (TargetOptions(fp8="float"), TargetOptions(dtype=torch.float16)):
            found = []
            for folder in folders:
                target = tmp_path / f"{folder.name}-{options.fp8}"
                convert(folder, target, "hf", options)
                found.append({n: t.dtype for n, t in open_checkpoint(target).stored.items()})
            assert found[0] == {foo_name(name): dtype for name, dtype in found[1].items()}
            assert len(set(found[0].values())) > 1

    def test_without_mtp_layers(self, foo_v3, tmp_path):
        foo, _ = write_both(tmp_path)
        assert inspect_checkpoint(foo).model["mtp_layers"] == 1
        report = convert(foo, tmp_path / "without", "megatron", exclude_mtp=True)
        assert {name.split(".")[2] for name in report.plan.left_out} == {"3"}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"depth": None}, "depth is missing"),
            ({"num_experts": 0}, "num_experts must be an integer from 1"),
            ({"value_gate": True}, "value_gate must be False: Megatron has none, got True"),
            ({"rope_scaling": {"bias": 1}}, "rope_scaling.bias must be 0, got 1"),
            ({"architectures": ["DeepseekV3ForCausalLM"]}, "must be ['FooV3ForCausalLM']"),
        ],
    )
    def test_refused_fields(self, foo_v3, changes, message):
        with refused(message):
            ModelConfig.from_hugging_face({**foo_config(), **changes})

    def test_refused_tensors(self, foo_v3, tmp_path):
        """Messages have the names in the files."""
        config = ModelConfig.from_hugging_face(foo_config())
        tensors = {foo_name(n): t for n, t in random_tensors(tiny_config()).items()}
        tensors["transformer.blocks.0.attn.kv_c.weight"] = tensors.pop(
            "transformer.blocks.0.attn.kv_b.weight"
        )
        folder = write_hugging_face(tmp_path / "foo", config, tensors)
        with refused(
            "transformer.blocks.0.attn.kv_b.weight is missing",
            "attn.kv_c.weight of shape (128, 24) is unknown; the nearest known name is",
        ):
            convert(folder, tmp_path / "out", "absorbed")

    def test_gone_again(self):
        with refused("model_type must be 'axk1' or 'deepseek_v2'"):
            ModelConfig.from_hugging_face(foo_config())


def test_files_that_skt_released(tmp_path):
    """Without biases of routers, and with norms of dense layers: transformers ignores both."""
    saved = open_checkpoint(save(make_model(OTHERS["axk1"]), tmp_path / "saved"))
    tensors, norm = load_all(dict(saved.stored)), "model.layers.0.post_mlp_layernorm.weight"
    kept = {name: tensor for name, tensor in tensors.items() if "e_score" not in name}
    extra = {norm: torch.full((64,), 0.5)}
    folder = write_hugging_face(tmp_path / "hf", saved.config, {**kept, **extra})
    model, tokens = transformers.AutoModelForCausalLM.from_pretrained(folder), token_batch()
    change_json(folder / "config.json", model_type="AXK1")
    checkpoint = open_checkpoint(folder)
    assert [*checkpoint.left_alone] == [norm] and len(checkpoint.notes) == 2
    convert(folder, tmp_path / "absorbed", "absorbed")
    found = checkpoint_logits(open_checkpoint(tmp_path / "absorbed"), tokens)
    torch.testing.assert_close(found, logits_of(model, tokens), rtol=1e-3, atol=1e-3)
    assert verify(folder, tmp_path / "absorbed", logits=False).equal
    kept["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(8)
    other = open_checkpoint(write_hugging_face(tmp_path / "other", saved.config, kept))
    with refused("model.layers.2.mlp.gate.e_score_correction_bias is missing"):
        other.hugging_face_tensors()


def test_names_that_sarvam_released():
    """As transformers reads them, and not beside other values of the names it saves."""
    own = {**hugging_face_config(), "model_type": "sarvam_mla", "n_group": 1, "head_dim": 32}
    own["architectures"] = ["SarvamMLAForCausalLM"]
    old = {**own, "rope_scaling": {**own["rope_scaling"], "type": "deepseek_yarn"}}
    for name, alias in {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }.items():
        old[alias] = old.pop(name)
    for name in ("n_group", "topk_group", "q_lora_rank"):
        del old[name]
    found = ModelConfig.from_hugging_face(old)
    assert found == ModelConfig.from_hugging_face({**own, "q_lora_rank": None})
    theirs = transformers.SarvamMLAConfig(**old)
    assert theirs.n_routed_experts == found.num_experts == 4
    assert theirs.n_shared_experts == found.num_shared_experts == 2
    assert theirs.rope_parameters["rope_type"] == "yarn"
    assert read_function(found.fields, found).rotary.rope_type == "yarn"
    with refused("n_routed_experts must be the same as num_experts, 8, got 4"):
        ModelConfig.from_hugging_face({**own, "num_experts": 8})
