"""Adapters in PEFT's format on a live model: the logits of transformers, and of PEFT itself.

A folder that is written here, by PEFT or by this package gives the same logits in all three, in
float32 on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from absorbed_mla.lora import (
    load_peft_adapter,
    merge_lora,
    remove_lora,
    save_peft_adapter,
    unmerge_lora,
)
from absorbed_mla.lora.model import attentions
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.logits import (
    load_megatron_model,
    megatron_logits,
    megatron_model,
    without_mtp,
)
from tests.conversion.models import Architecture, logits_of, make_model, save, token_batch
from tests.conversion.test_logits import TOLERANCE, WRONG
from tests.support.refusal import refusal

QUERY = {True: ("q_a_proj", "q_b_proj"), False: ("q_proj",)}
# kv_b_proj has another rank, and another factor, than the others.
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "rank_pattern": {"kv_b_proj": 3},
    "alpha_pattern": {"self_attn.kv_b_proj": 8},
    "bias": "none",
}


class Models:
    """A model of transformers and of Megatron with the same weights, and what both compute."""

    def __init__(self, q_lora: bool, folder: Path) -> None:
        self.theirs = make_model(Architecture("v3", q_lora=q_lora, moe=False, rope="yarn"))
        self.folder, self.tokens = save(self.theirs, folder / "hf"), token_batch()
        config, tensors = without_mtp(
            (opened := open_checkpoint(self.folder)).config, opened.hugging_face_tensors()
        )
        self.ours = megatron_model(config, "absorbed")
        load_megatron_model(self.ours, config, tensors)
        self.names = (*QUERY[q_lora], "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        self.base = logits_of(self.theirs, self.tokens)

    def updated(self, adapter: dict[str, Tensor], scaling) -> Tensor:
        """Logits of transformers' model with every update in its weights."""
        layers, found = self.theirs.model.layers, []
        for key in [key for key in adapter if key.endswith("lora_A.weight")]:
            _, _, _, _, number, _, name, *_ = key.split(".")
            weight = getattr(layers[int(number)].self_attn, name).weight
            found.append((weight, weight.detach().clone()))
            b = adapter[key.replace("lora_A", "lora_B")]
            weight.data += scaling(name) * b @ adapter[key]
        logits = logits_of(self.theirs, self.tokens)
        for weight, former in found:
            weight.data = former
        return logits

    def error(self, expected: Tensor) -> float:
        """Of our logits, relative to the largest one."""
        found = megatron_logits(self.ours, self.tokens)
        return float((found - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=[True, False], ids=["q_lora", "no_q_lora"])
def models(request, tmp_path_factory) -> Models:
    return Models(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter(models, tmp_path) -> tuple[Path, dict[str, Tensor]]:
    """A folder with LoRA of every layer of the attention, and its tensors."""
    generator, tensors = torch.Generator().manual_seed(3), {}
    for number, layer in enumerate(models.theirs.model.layers):
        for name in models.names:
            rows, columns = getattr(layer.self_attn, name).weight.shape
            rank = 3 if name == "kv_b_proj" else 4
            for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                path = f"layers.{number}.self_attn.{name}"
                key = f"base_model.model.model.{path}.lora_{factor}.weight"
                tensors[key] = torch.randn(shape, generator=generator) / 8
    return write(tmp_path / "adapter", tensors), tensors


def write(folder: Path, tensors: dict[str, Tensor], **changes) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def scaling_of(name: str) -> float:
    return 8 / 3 if name == "kv_b_proj" else 6 / 4


def test_logits_of_transformers(models, adapter):
    """Apart, merged, unmerged to the bit, and taken off."""
    folder, tensors = adapter
    expected = models.updated(tensors, scaling_of)
    before = {k: v.clone() for k, v in models.ours.state_dict().items() if v is not None}
    load_peft_adapter(models.ours, folder)
    assert models.error(models.base) > WRONG
    assert models.error(expected) < TOLERANCE
    apart = megatron_logits(models.ours, models.tokens)
    merge_lora(models.ours)
    assert not torch.equal(megatron_logits(models.ours, models.tokens), apart)
    assert models.error(expected) < TOLERANCE
    unmerge_lora(models.ours)
    assert torch.equal(megatron_logits(models.ours, models.tokens), apart)
    remove_lora(models.ours)
    after = models.ours.state_dict()
    assert {k for k, v in after.items() if v is not None} == set(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert models.error(models.base) < TOLERANCE


def test_written_as_read(models, adapter, tmp_path):
    """One kv_b_proj while K-up and V-up have the same A, and of both ranks when they differ."""
    folder, tensors = adapter
    load_peft_adapter(models.ours, folder)
    try:
        save_peft_adapter(models.ours, tmp_path / "same", "base")
        written = load_file(tmp_path / "same" / "adapter_model.safetensors")
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensors[key]) for key in tensors)
        config = json.loads((tmp_path / "same" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "base"
        assert {*config["rank_pattern"].values()} == {3}
        with torch.no_grad():
            for attention in attentions(models.ours):
                attention.lora["linear_v_up_proj"].lora_A.weight.mul_(-1.5)
        expected = megatron_logits(models.ours, models.tokens)
        save_peft_adapter(models.ours, tmp_path / "apart")
    finally:
        remove_lora(models.ours)
    written = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    assert {len(v) for k, v in written.items() if "kv_b_proj.lora_A" in k} == {6}
    assert models.updated(written, scaling_of).sub(expected).abs().max() < TOLERANCE * 20
    load_peft_adapter(models.ours, tmp_path / "apart")
    try:
        assert models.error(expected) < TOLERANCE
    finally:
        remove_lora(models.ours)


def test_logits_of_peft(models, adapter, tmp_path):
    """PEFT reads what is written here, and the other way round."""
    peft = pytest.importorskip("peft")
    load_peft_adapter(models.ours, adapter[0])
    try:
        with torch.no_grad():
            for attention in attentions(models.ours):
                attention.lora["linear_k_up_proj"].lora_A.weight.mul_(-1.5)
        save_peft_adapter(models.ours, tmp_path / "ours")
        theirs = peft.PeftModel.from_pretrained(models.theirs, tmp_path / "ours")
        assert models.error(logits_of(theirs, models.tokens)) < TOLERANCE
    finally:
        remove_lora(models.ours)
    theirs.unload()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=5,
        use_rslora=True,
        target_modules=[*models.names],
        rank_pattern={r"1.self_attn.o_proj": 2},
        alpha_pattern={"q_b_proj": 3},
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(models.theirs, config)
    theirs.save_pretrained(tmp_path / "theirs")
    load_peft_adapter(models.ours, tmp_path / "theirs")
    try:
        assert models.error(logits_of(theirs, models.tokens)) < TOLERANCE
    finally:
        remove_lora(models.ours)
        theirs.unload()


NAME = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"use_dora": True}, {}, ["use_dora must be unset, got True"]),
        ({"peft_type": "LOHA"}, {}, ["peft_type must be 'LORA', got 'LOHA'"]),
        ({"bias": "all"}, {}, ["bias must be 'none'"]),
        ({"init_lora_weights": "pissa"}, {}, ["init_lora_weights must be one of"]),
        ({"r": 0}, {}, ["r must be an integer from 1"]),
        ({"rank_pattern": {"(a+)+": 2}}, {}, ["rank_pattern must be numbers above 0"]),
        ({"modules_to_save": ["lm_head"]}, {}, ["modules_to_save must be unset"]),
        ({}, {NAME.format(0, "C"): (4, 4)}, ["lora_C.weight is no LoRA of an attention"]),
        ({}, {NAME.format(9, "A"): (4, 80)}, ["the model has no layers.9.self_attn.o_proj"]),
        ({}, {NAME.format(0, "A"): (4, 79)}, ["lora_A must be [4, 80], got (4, 79)"]),
        ({}, {NAME.format(0, "A"): (4, 80)}, ["lora_B must be [64, 4], got None"]),
    ],
)
def test_refused(models, tmp_path, changes, tensors, words):
    """Everything that would be lost, with the reason."""
    filled = {key: torch.ones(shape) for key, shape in tensors.items()}
    folder = write(tmp_path / "a", filled, **changes)
    with refusal(str(folder), *words):
        load_peft_adapter(models.ours, folder)
    with refusal("no LoRA"):
        remove_lora(models.ours)


def test_other_rotary_channels(models, adapter, tmp_path, monkeypatch):
    """MiniCPM3's are in another order in Hugging Face's model."""
    load_peft_adapter(models.ours, adapter[0])
    for attention in attentions(models.ours):
        options = attention.options.replace(rope_factors=(1.0,))
        monkeypatch.setattr(attention, "options", options)
    with refusal("rope_factors=None"):
        save_peft_adapter(models.ours, tmp_path)
    remove_lora(models.ours)
    with refusal("rope_factors=None"):
        load_peft_adapter(models.ours, adapter[0])


def test_no_folder(models, tmp_path):
    with refusal("is no adapter in PEFT's format", "adapter_config.json"):
        load_peft_adapter(models.ours, tmp_path)
