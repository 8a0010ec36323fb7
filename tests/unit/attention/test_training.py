"""Training: every dtype, dense and mixed layers, recomputation, frozen parameters."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from megatron.core import tensor_parallel

from absorbed_mla.core_attention.forms import absorbed
from absorbed_mla.recomputed_outputs import SameLayout
from tests.support import world
from tests.support.cases import TINY, VARIANTS
from tests.support.combinations import grid
from tests.support.harness import Setup, build_attention, random_attention, run
from tests.support.layouts import dense
from tests.support.models import MIXED, call, gpt_model, token_batch

DENSE = {"num_layers": 2}
SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["mla_up_proj", "core_attn"],
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SOME_LAYERS = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}


def gradients(**config) -> dict[str, torch.Tensor]:
    """Of the loss of one batch with every kind of dropout, and the loss itself."""
    model = gpt_model(attention_dropout=0.1, hidden_dropout=0.1, **config)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    loss = call(model, labels=token_batch(6)).mean()
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize(
    "recompute", [SELECTIVE, FULL, SOME_LAYERS], ids=["selective", "full", "block"]
)
@pytest.mark.parametrize(
    "layers",
    [{**DENSE, "dtype": torch.float32}, {**MIXED, "dtype": torch.bfloat16}],
    ids=["dense-fp32", "mixed-bf16"],
)
def test_recomputation_changes_no_bit(layers, recompute):
    """Of a whole model, with dropout in the attention and behind it."""
    expected, actual = gradients(**layers), gradients(**layers, **recompute)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
    assert not torch.equal(gradients(**layers, seed=1)["loss"], expected["loss"])


DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@grid(1, {"layers": {"mixed": MIXED, "dense": DENSE}, "dtype": DTYPES})
def test_loss_goes_down(dtype, layers):
    """A few steps on one batch, with recomputation, as a user would start."""
    model = gpt_model(dtype=dtype, **layers, **SELECTIVE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = call(model, labels=token_batch(6)).float().mean()
        # fp16 gradients of a mean over tokens would underflow.
        (loss * 64).backward()
        for parameter in model.parameters():
            assert torch.isfinite(parameter.grad).all()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize(
    ("given", "taken", "refused"),
    [
        ((3, 4), torch.zeros(3, 4), torch.zeros(4, 3).T),
        ((3,), torch.zeros(3), torch.zeros(4)[1:]),
        # An axis of one element may have any stride.
        ((3, 1, 4), torch.zeros(3, 1, 4).as_strided((3, 1, 4), (4, 99, 1)), None),
    ],
    ids=["strides", "offset", "one element"],
)
def test_outputs_lie_in_memory_as_they_did(given, taken, refused):
    function = SameLayout(lambda x: (x, x[..., :1]))
    function(torch.zeros(given))
    function(taken)
    if refused is not None:
        with pytest.raises(AssertionError, match="lie in memory"):
            function(refused)


def test_a_query_that_lies_otherwise_without_gradients_is_found(monkeypatch):
    """Its numbers would be those of other heads, and gradients wrong."""
    setup = Setup(form="absorbed", recompute=("mla_up_proj",))
    layout = dense(5, 2)
    rows = (layout.random_rows(TINY.hidden, i) for i in (1, 2))
    call = partial(run, random_attention(TINY, setup), TINY, setup, layout, *rows)
    call()
    absorb_query = absorbed.absorb_query

    def contiguous_without_gradients(q_nope, w_uk):
        found = absorb_query(q_nope, w_uk)
        return found if torch.is_grad_enabled() else found.contiguous()

    found = staticmethod(contiguous_without_gradients)
    monkeypatch.setattr(absorbed.AbsorbedForm, "absorb_query", found)
    with pytest.raises(AssertionError, match="lie in memory"):
        call()


MIXES = [(), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")]
TRAINED = [
    {"linear_q_up_proj.weight"},
    {"linear_kv_down_proj.weight"},
    {"linear_k_up_proj.weight"},
    {"linear_v_up_proj.weight"},
    {"q_layernorm.weight", "kv_layernorm.weight"},
    {"linear_proj.weight"},
    {"linear_q_proj.weight", "linear_proj.weight"},
]


def gradients_of(mla, trained: set[str], recompute: tuple[str, ...], form: str) -> dict:
    """Gradients of the trained parameters; the input needs none, as after a frozen embedding."""
    attention = random_attention(mla, Setup(form=form, recompute=recompute))
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(name in trained)
    x = torch.randn(9, 2, mla.hidden, generator=torch.Generator().manual_seed(1))
    output, _ = attention(x.to(world.device(), torch.float64), None)
    output.square().sum().backward()
    return {n: p.grad for n, p in attention.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("trained", TRAINED, ids=lambda names: "+".join(sorted(names)))
def test_frozen_parameters(trained, form):
    """Megatron's checkpoint alone would raise, or leave a parameter without gradient silently."""
    mla = replace(TINY, q_lora_rank=None) if "linear_q_proj.weight" in trained else TINY
    expected = gradients_of(mla, trained, (), form)
    assert set(expected) == trained
    for recompute in MIXES[1:]:
        for name, gradient in gradients_of(mla, trained, recompute, form).items():
            assert gradient is not None and torch.equal(gradient, expected[name]), recompute


def test_training_after_evaluation_in_inference_mode():
    attention = build_attention(TINY, Setup())
    x = torch.randn(37, 1, TINY.hidden, dtype=torch.float64, device=world.device())
    with torch.inference_mode():
        attention(x, None)
    output, _ = attention(x.requires_grad_(), None)
    output.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "mla, query",
    [
        (TINY, {"linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj"}),
        (TINY, {"linear_q_up_proj", "linear_qkv_down_proj"}),
        (VARIANTS["gate_no_rope"], {"linear_q_proj", "linear_kv_down_proj", "linear_gate"}),
    ],
    ids=["separate", "fused", "no_q_lora"],
)
def test_delayed_weight_gradients_of(mla, query):
    """Megatron asks for them after backward; every layer that is applied must be asked once."""
    fused = "linear_qkv_down_proj" in query
    attention = build_attention(mla, Setup(), mla_down_proj_fusion=fused)
    asked = []
    for name, child in attention.named_children():
        child.backward_dw = lambda name=name: asked.append(name)
    attention.backward_dw()
    assert sorted(asked) == sorted({*query, "linear_proj"})
