"""The activation that replaces Megatron's in models that only generate."""

import pytest
import torch
import torch.nn.functional as F

from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.weights.checkpoint import open_model
from absorbed_mla.serving.weights.fused_swiglu import SwiGLU, fuse_swiglu
from absorbed_mla.serving.weights.load import load_model
from tests.support import needs
from tests.support.llm import tiny_folder
from tests.support.models import MIXED, gpt_model, logits

SILU = {**MIXED, "activation_func": F.silu}


def activations(model) -> list[SwiGLU]:
    return [module for module in model.modules() if isinstance(module, SwiGLU)]


@needs.no_gpu
def test_same_logits():
    """Of dense MLPs, experts and shared experts; the model's own config stays as it was."""
    model = gpt_model(**SILU)
    expected = logits(model)
    fuse_swiglu(model)
    assert len(activations(model)) == 1 + 2 * (4 + 1)
    assert torch.equal(logits(model), expected)
    assert not model.config.use_te_activation_func


def test_same_bits():
    """On a GPU, too, where the default rounds less often."""
    model = gpt_model(dtype=torch.bfloat16, **SILU)
    expected = logits(model)
    fuse_swiglu(model, rounds_each_step=True)
    assert torch.equal(logits(model), expected)


@needs.no_gpu
@pytest.mark.parametrize("parity", [False, True])
def test_parity_mode_rounds_each_step(tmp_path, parity):
    """In a loaded model."""
    options = LLMOptions(tensor_parallel_size=1, parity=parity)
    model = load_model(open_model(tiny_folder(tmp_path / "m")), options, torch.device("cpu"))
    assert {module.rounds_each_step for module in activations(model)} == {parity}


def test_it_is_called():
    model = gpt_model(**SILU)
    before = logits(model)
    fuse_swiglu(model)
    for activation in activations(model):
        activation.forward = lambda x: x.chunk(2, dim=-1)[0]
    assert not torch.allclose(logits(model), before)


def test_other_activations_stay():
    for changes in ({"activation_func": F.gelu}, {"activation_func_clamp_value": 7.0}):
        model = gpt_model(**{**SILU, **changes})
        fuse_swiglu(model)
        assert not activations(model)
