"""Attention dropout: drawn once per call, the same pattern in every execution of that call."""

import itertools
from dataclasses import replace

import pytest
import torch
from megatron.core import tensor_parallel

from absorbed_mla.core_attention.masks.dropout import keep_factors
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from tests.support import world
from tests.support.cases import TINY
from tests.support.combinations import grid
from tests.support.differentiable import attention as differentiable_attention
from tests.support.harness import Setup, named_tensors, random_attention, run
from tests.support.layouts import LAYOUTS, dense, grid_layout
from tests.support.numerics import compare

RATE = 0.3
RECOMPUTE = [(), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")]
FORMS = ("absorbed", "expanded")


def make(setup: Setup, rate: float = RATE):
    return random_attention(TINY, setup, attention_dropout=rate)


def outcome(
    setup: Setup, layout=None, seed: int = 1, rate: float = RATE
) -> dict[str, torch.Tensor]:
    """Output and gradients of one call in training mode."""
    layout = layout or dense(11, 2)
    attention = make(setup, rate)
    x, output_grad = (layout.random_rows(TINY.hidden, i) for i in (1, 2))
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return named_tensors(TINY, run(attention, TINY, setup, layout, x, output_grad))


def rules(tokens: int = 12, rate: float = RATE, seed: int = 5) -> ScoreRules:
    index = torch.arange(tokens, device=world.device())
    return ScoreRules(
        0.4,
        (Span(0, tokens, 0, tokens, 0),),
        dropout=rate,
        dropout_seed=seed,
        query_tokens=index,
        key_tokens=index,
        query_chunk_size=5,
    )


def operands(tokens: int = 12, batch: int = 2, heads: int = 3) -> list[torch.Tensor]:
    shapes = [(heads, 5), (heads, 4), (heads, 5), (4,), (heads, 6)]
    leaves = [torch.randn(tokens, batch, *s, dtype=torch.float64) for s in shapes]
    return [x.to(world.device()).requires_grad_() for x in leaves]


@pytest.mark.parametrize("form", FORMS)
def test_the_seed_decides(form):
    setup = Setup(form=form)
    first, again, other = (outcome(setup, seed=seed) for seed in (1, 1, 2))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert not torch.equal(tensor, other[name]), name


def test_every_call_draws_anew():
    attention = make(Setup())
    x = dense(11, 2).random_rows(TINY.hidden, 1).to(world.device())
    assert not torch.equal(attention(x, None)[0], attention(x, None)[0])


def test_the_default_generator_is_left_alone():
    """It is equal on all tensor-parallel ranks: their heads would share a pattern drawn from it."""
    attention = make(Setup())
    x = dense(11, 2).random_rows(TINY.hidden, 1).to(world.device())
    default = torch.cuda if torch.cuda.is_available() else torch
    before = default.get_rng_state()
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    attention(x, None)
    after = tensor_parallel.get_cuda_rng_tracker().get_states()
    assert torch.equal(default.get_rng_state(), before)
    moved = [name for name in states if not torch.equal(states[name], after[name])]
    assert moved == ["model-parallel-rng"]


@grid(1, {"form": FORMS, "layout_name": LAYOUTS, "recompute": RECOMPUTE[1:]})
def test_recomputation_repeats_the_pattern(form, layout_name, recompute):
    """Another pattern in backward would be the gradient of another function."""
    layout = grid_layout(layout_name, divisible=False)
    setup = Setup(form=form)
    expected = outcome(setup, layout)
    actual = outcome(replace(setup, recompute=recompute), layout)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_forms_share_the_pattern(layout_name):
    layout = grid_layout(layout_name, divisible=False)
    absorbed, expanded = (outcome(Setup(form=form), layout) for form in FORMS)
    compare(absorbed, expanded, 1e-10).check("(absorbed against expanded)")


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=lambda r: "+".join(r) or "none")
def test_none_in_eval_mode(recompute):
    x = dense(11, 2).random_rows(TINY.hidden, 1).to(world.device())
    attention, plain = make(Setup(recompute=recompute)).eval(), make(Setup(), rate=0.0)
    assert torch.equal(attention(x, None)[0], plain(x, None)[0])
    attention.train()
    assert not torch.equal(attention(x, None)[0], plain(x, None)[0])


def test_gradient_of_attention_by_finite_differences():
    """Output and LSE; the LSE does not know of dropout."""
    leaves = operands(tokens=6, batch=1, heads=2)
    assert torch.autograd.gradcheck(lambda *x: differentiable_attention(*x, rules(6)), leaves)


def test_probabilities_are_multiplied():
    """By the factors of their pairs; the LSE does not know of dropout."""
    q, q_rope, k, k_rope, v = operands()
    index, drawn = torch.arange(12, device=world.device()), rules()
    found, lse = differentiable_attention(q, q_rope, k, k_rope, v, drawn)
    scores = torch.einsum("qbnd,kbnd->bnqk", q, k) + torch.einsum("qbnr,kbr->bnqk", q_rope, k_rope)
    scores = (scores * drawn.scale).masked_fill(index > index[:, None], -torch.inf)
    factors = keep_factors(RATE, 5, batch=index[:2], heads=index[:3], queries=index, keys=index)
    expected = torch.einsum("bnqk,kbnv->qbnv", scores.softmax(-1) * factors, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1).permute(2, 0, 1), rtol=1e-12, atol=0)


def test_rate_and_factor():
    """Drops the given share of probabilities and scales the others up."""
    everything = replace(rules(tokens=400), spans=(Span(0, 400, 0, 400, None),))
    probs = torch.ones(2, 3, 5, 400, device=world.device())
    masks = [everything.keep_mask(probs, chunk) for chunk in everything.chunks()]
    assert torch.stack(masks).unique().tolist() == pytest.approx([0.0, 1 / (1 - RATE)])
    dropped = torch.stack(masks).eq(0).double().mean().item()
    count = len(masks) * probs.numel()
    assert abs(dropped - RATE) < 5 * (RATE * (1 - RATE) / count) ** 0.5
    for a, b in itertools.combinations(masks[:4], 2):
        assert not torch.equal(a, b)  # chunks must not repeat each other's pattern


@pytest.mark.parametrize("dim", range(4), ids=["batch", "heads", "queries", "keys"])
def test_decisions_are_independent(dim):
    """Neighbours along every axis are dropped together as often as chance has it."""
    index = torch.arange(64, device=world.device())
    kept = keep_factors(RATE, 3, batch=index[:8], heads=index[:16], queries=index, keys=index) > 0
    one, next_one = (
        kept.narrow(dim, 0, kept.shape[dim] - 1),
        kept.narrow(dim, 1, kept.shape[dim] - 1),
    )
    both, expected = (one & next_one).double().mean().item(), (1 - RATE) ** 2
    assert abs(both - expected) < 5 * (expected * (1 - expected) / one.numel()) ** 0.5


def test_pattern_belongs_to_the_pair():
    """Whatever part of the scores is asked for, in whatever order."""
    index = torch.arange(20, device=world.device())
    whole = keep_factors(RATE, 9, batch=index[:2], heads=index[:6], queries=index, keys=index)
    some = torch.tensor([7, 3, 19], device=world.device())
    part = keep_factors(RATE, 9, batch=index[1:2], heads=index[2:5], queries=some, keys=some + 0)
    assert torch.equal(part, whole[1:2, 2:5][:, :, some][..., some])
