"""Models of other names whose attention is plain MLA: logits of transformers, and bits back.

What is no plain MLA is refused, and the message says what it has.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import TargetOptions
from checkpoint_conversion.inspection import inspect_checkpoint
from checkpoint_conversion.logits import checkpoint_logits
from checkpoint_conversion.model import ModelConfig
from tests.conversion.converted import loaded_logits
from tests.conversion.models import (
    Architecture,
    logits_of,
    make_kimi_k25,
    make_model,
    save,
    token_batch,
)
from tests.conversion.support import hugging_face_config
from tests.support.refusal import refusal

TOLERANCE = 1e-4
MODELS = {
    "glm4_moe_lite": Architecture("glm", q_lora=True, moe=True, rope="rope"),
    "glm4_moe_lite dense yarn": Architecture("glm", q_lora=False, moe=False, rope="yarn"),
    "mistral4": Architecture("mistral4", q_lora=True, moe=True, rope="yarn"),
    "mistral4 dense": Architecture("mistral4", q_lora=False, moe=False, rope="yarn"),
    "kimi_k25": Architecture("v3", q_lora=True, moe=True, rope="yarn"),
}


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files, read with nothing of the package."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(scope="module", params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request, tmp_path_factory):
    """A model of transformers, its folder, and what it computes of some tokens."""
    make = make_kimi_k25 if request.param == "kimi_k25" else make_model
    model = make(MODELS[request.param])
    folder = save(model, tmp_path_factory.mktemp("model") / "hf")
    tokens = token_batch()
    return request.param.split()[0], folder, tokens, logits_of(model, tokens)


def test_logits(model, tmp_path):
    """In Megatron, loaded by Megatron; in transformers, from the folder and after a round trip."""
    kind, folder, tokens, expected = model
    bound = TOLERANCE * expected.abs().max()
    convert(folder, tmp_path / "absorbed", "absorbed")
    assert (loaded_logits(tmp_path / "absorbed", tokens) - expected).abs().max() < bound
    convert(folder, tmp_path / "megatron", "megatron")
    for path in (folder, tmp_path / "megatron"):
        logits = checkpoint_logits(open_checkpoint(path), tokens)
        assert (logits - expected).abs().max() < bound, path
    convert(tmp_path / "absorbed", tmp_path / "back", "hf")
    (name,) = json.loads((tmp_path / "back/config.json").read_text())["architectures"]
    # AutoModelForCausalLM does not know Mistral 4.
    back, report = getattr(transformers, name).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    assert (logits_of(back, tokens) - expected).abs().max() < bound
    assert back.config.model_type == {"kimi_k25": "deepseek_v3"}.get(kind, kind)


def test_bits_come_back(model, tmp_path):
    kind, folder, _, _ = model
    convert(folder, tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", "hf")
    before, after = stored(folder), stored(tmp_path / "back")
    if kind == "kimi_k25":
        prefix = "language_model."
        before = {
            name.removeprefix(prefix).replace("model.blocks.", "model.layers."): tensor
            for name, tensor in before.items()
            if name.startswith(prefix)
        }
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("config", ["whole", "text"])
def test_what_a_text_model_leaves_out_is_said(config, tmp_path):
    """Whether config.json is that of the whole model or of its text model."""
    folder = save(make_kimi_k25(MODELS["kimi_k25"]), tmp_path / "hf")
    if config == "text":
        whole = json.loads((folder / "config.json").read_text())
        text = whole["text_config"] | {"model_type": "deepseek_v3"}
        (folder / "config.json").write_text(json.dumps(text))
    inspection = inspect_checkpoint(folder)
    assert not inspection.problems
    images = [n for n in stored(folder) if not n.startswith("language_model.")]
    assert inspection.left_alone.tensors == len(images) > 20
    assert f"{len(images)} tensors for images" in " ".join(inspection.notes)
    report = convert(folder, tmp_path / "absorbed", "absorbed")
    assert set(report.plan.left_out) == set(images)


def test_experts_that_are_no_stack_of_the_model(tmp_path):
    folder = save(make_model(MODELS["mistral4"]), tmp_path / "hf")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace('"n_routed_experts": 8', '"n_routed_experts": 4')
    )
    with refusal("do not fit the model", "mlp.experts.gate_up_proj of shape (8, 64, 64)"):
        convert(folder, tmp_path / "out", "absorbed")


def test_mistral4_is_not_quantised(tmp_path):
    folder = save(make_model(MODELS["mistral4"]), tmp_path / "hf")
    with refusal("--fp8 float", "mistral4 stores its experts as one tensor"):
        convert(folder, tmp_path / "out", "hf", TargetOptions(fp8="float"))


MISTRAL4 = {
    "model_type": "mistral4",
    "architectures": ["Mistral4ForCausalLM"],
    "scoring_func": None,
    "topk_method": None,
    "n_group": 1,
    "rope_scaling": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (
            {"model_type": "longcat_flash"},
            ("mla_scale_q_lora", "two attentions in a layer", "zero_expert_num"),
        ),
        ({"model_type": "kimi_linear"}, ("linear attention",)),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            ("'mistral3' has a text model ('mistral4')", "kimi_k25"),
        ),
        (
            {
                "model_type": "kimi_k25",
                "text_config": hugging_face_config(
                    quantization_config={"quant_method": "compressed-tensors"}
                ),
            },
            ("quantization_config.quant_method must be 'fp8'", "compressed-tensors"),
        ),
        (
            MISTRAL4
            | {"rope_parameters": MISTRAL4["rope_parameters"] | {"llama_4_scaling_beta": 0.1}},
            ("rope_parameters.llama_4_scaling_beta must be 0", "scales queries by their position"),
        ),
        (MISTRAL4 | {"n_group": 2}, ("n_group must be 1",)),
        (MISTRAL4 | {"rope_parameters": None}, ("rope_parameters is missing",)),
        (MISTRAL4 | {"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor must be 1",)),
        (
            {
                "model_type": "glm4_moe_lite",
                "architectures": ["Glm4MoeLiteForCausalLM"],
                "mlp_layer_types": ["dense", "sparse"],
            },
            ("mlp_layer_types must be a list of 3",),
        ),
        (
            {
                "model_type": "glm4_moe_lite",
                "architectures": ["Glm4MoeLiteForCausalLM"],
                "mlp_layer_types": [[], {}, "dense"],
            },
            ("mlp_layer_types must be a list of 3",),
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_is_missing_is_said(fields, messages):
    with refusal(*messages):
        ModelConfig.from_hugging_face(hugging_face_config() | fields)


def test_released_config_of_glm():
    """GLM-4.7-Flash's own, which says first_k_dense_replace instead of mlp_layer_types."""
    config = ModelConfig.from_hugging_face(
        hugging_face_config(
            model_type="glm4_moe_lite",
            architectures=["Glm4MoeLiteForCausalLM"],
            partial_rotary_factor=1.0,
            rope_scaling=None,
            n_group=1,
        )
    )
    assert config.moe_layers == (False, True, True)
    assert config.router_bias
