"""FP8 without a GPU: what is switched, and when; what it computes is in tests/distributed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.fp8 import dequantized, without_fp8
from absorbed_mla.serving.megatron_engine.build import inference_mode
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.models import gpt_model

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def one_process():
    with world.parallel():
        yield


def test_generation_is_without_it():
    """Blocks read the config in every forward; afterwards training is in FP8 again."""
    model = gpt_model()
    model.config.fp8 = "hybrid"
    with inference_mode(model):
        assert model.decoder.config.fp8 is None
    assert model.decoder.config.fp8 == "hybrid"


def test_an_error_does_not_leave_it_off():
    config = SimpleNamespace(fp8="e4m3")
    with pytest.raises(KeyError), without_fp8(config):
        raise KeyError
    assert config.fp8 == "e4m3"


@pytest.mark.parametrize("q_lora_rank", [None, 16])
def test_layers_of_a_recomputed_input_norm(q_lora_rank):
    """All that multiply hidden states, and no others, keep them instead of a copy in FP8."""
    mla = replace(TINY, q_lora_rank=q_lora_rank, gate="headwise")
    attention = build_attention(mla, Setup())
    layers = {name: m for name, m in attention.named_children() if name.startswith("linear")}
    for layer in layers.values():
        layer.save_original_input = False
    attention.set_for_recompute_input_layernorm()
    of_query = "linear_q_proj" if q_lora_rank is None else "linear_q_down_proj"
    kept = {name for name, layer in layers.items() if layer.save_original_input}
    assert kept == {of_query, "linear_kv_down_proj", "linear_gate"}


def test_plain_weights_are_what_they_are():
    weight = torch.ones(2)
    assert dequantized(weight) is weight
