"""Kernels of grouped experts against PyTorch in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from absorbed_mla.deepseek_router import topk_routing
from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens
from tests.support.backends import triton_interpreter

# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.moe.choice import choose_experts
    from absorbed_mla.kernels.moe.logits import partial_logits
    from absorbed_mla.kernels.moe.order import order_by_expert
    from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product
    from absorbed_mla.kernels.moe.sums import summed
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 1e-6}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
# The rows behind the last one of each expert: of 4 experts, some without rows, and of other ranks.
ENDS = {"some": [0, 7, 7, 40], "many": [33, 34, 36, 40], "others": [1, 2, 3, 20], "none": [0] * 4}
ends_of = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def table(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@dtypes
@ends_of
@pytest.mark.parametrize("width", [96, 40])
def test_swiglu(dtype, ends, width):
    x, probs = random(40, 2 * width, dtype=dtype), random(20, 2).abs()
    x[ends[-1] :] = torch.nan
    gate, up = x.double().chunk(2, -1)
    choices = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = F.silu(gate) * up * probs.double().flatten()[choices, None]
    found = swiglu(x, probs, choices, table(ends))
    assert error(found[: ends[-1]], expected[: ends[-1]]) < BOUNDS[dtype]


@dtypes
def test_gated(dtype):
    """Of tokens that nobody routes."""
    x = random(5, 1, 80, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    found = gated(x)
    assert found.shape == (5, 1, 40)
    assert error(found, F.silu(gate) * up) < BOUNDS[dtype]


@dtypes
@pytest.mark.parametrize("first", [None, 2])
def test_sums(dtype, first):
    """Also where experts of other ranks were chosen: their rows hold anything."""
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(11)]).to(DEVICE)
    rows = PermutedTokens.of(chosen, 8 if first is None else 4, first)
    x = random(33, 72, dtype=dtype)
    x[int(rows.ends[-1]) :] = torch.nan
    expected = x.double().nan_to_num()[rows.places].sum(1)
    assert error(summed(x, rows.places, rows.ends), expected) < BOUNDS[dtype]


@dtypes
@pytest.mark.parametrize("topk", [1, 2, 5, 8])
def test_sums_one_by_one(dtype, topk):
    """As adding rows to zeros, each rounded, which ``index_add_`` does."""
    chosen = torch.stack([torch.randperm(8)[:topk] for _ in range(11)]).to(DEVICE)
    rows = PermutedTokens.of(chosen, 8)
    x = random(11 * topk, 72, dtype=dtype)
    expected = x.new_zeros(11, 72)
    for row, token in enumerate(rows.tokens.tolist()):
        expected[token] += x[row]
    assert torch.equal(summed(x, rows.places, rows.ends, one_by_one=True), expected)
    if topk > 2 and dtype == torch.bfloat16:
        assert not torch.equal(summed(x, rows.places, rows.ends), expected)


@dtypes
@ends_of
@pytest.mark.parametrize(("columns", "summands"), [(128, 256), (72, 136)])
@pytest.mark.parametrize("taken", [False, True])
def test_few_rows(dtype, ends, columns, summands, taken):
    """Also of rows that lie elsewhere, some of them several times."""
    rows = random(40, summands, dtype=dtype)
    weights = random(4, columns, summands, dtype=dtype)
    if taken:
        tokens = torch.randint(40, (40,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        x, rows = rows, rows[tokens]
        x[[i for i in range(40) if i not in tokens[: ends[-1]].tolist()]] = torch.nan
        found = few_rows_product(x, weights, table(ends), tokens)
    else:
        found = few_rows_product(rows, weights, table(ends))
    for weight, begin, end in zip(weights, [0, *ends], ends):
        expected = rows[begin:end].double() @ weight.double().T
        assert error(found[begin:end], expected) < BOUNDS[dtype]


# Experts, K, groups, groups that a token may choose from.
ROUTERS = {
    "V3": (256, 8, 8, 4),
    "V2": (160, 6, 8, 3),
    "no groups": (24, 3, None, None),
    "all": (8, 8, None, None),
    "one": (8, 1, None, None),
    # So few experts that the lanes of a GPU's warp hold copies of their scores.
    "two of two groups": (8, 2, 2, 1),
    "all of small groups": (4, 4, 2, 2),
    "one of each group": (8, 4, 4, 4),
    "groups of three": (6, 3, 2, 1),
    "three groups": (48, 8, 3, 2),
}


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(("softmax", "biased"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_choice(router, softmax, biased, scale):
    """The experts and scores of Megatron's router."""
    experts, topk, groups, group_topk = router
    logits = random(7, experts)
    bias = random(experts) / 4 if biased else None
    common = {"group_topk": group_topk}
    expected = topk_routing_with_score_function(
        logits,
        topk,
        use_pre_softmax=softmax,
        num_groups=groups,
        scaling_factor=scale,
        score_function="softmax" if softmax else "sigmoid",
        expert_bias=bias,
        **common,
    )[0]
    scores, chosen = choose_experts(
        logits, topk, softmax=softmax, bias=bias, groups=groups, scale=scale, **common
    )
    assert chosen.shape == scores.shape == (7, topk)
    found = torch.zeros_like(logits).scatter_(1, chosen, scores)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert (expected != 0).sum() == 7 * topk


# Experts, K, groups, groups that a token may choose from, experts that rank a group.
RANKED = {
    "V2": (160, 6, 8, 3, 1),
    "V3": (48, 6, 4, 2, 2),
    "one": (24, 1, 8, 3, 2),
    "no groups": (24, 3, None, None, None),
}


@pytest.mark.parametrize("router", RANKED.values(), ids=RANKED)
@pytest.mark.parametrize(("softmax", "biased"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("normalized", [False, True])
def test_choice_as_models_rank_and_normalise(router, softmax, biased, normalized):
    """The experts and scores of ``topk_routing``, whose judge is float64."""
    experts, topk, groups, group_topk, of_group = router
    logits = random(33, experts)
    bias = random(experts) / 4 if biased else None
    common = {"group_topk": group_topk, "group_score_topk": of_group}
    expected, _ = topk_routing(
        logits,
        topk,
        use_pre_softmax=softmax,
        num_groups=groups,
        scaling_factor=2.5,
        score_function="softmax" if softmax else "sigmoid",
        expert_bias=bias,
        norm_topk_prob=normalized,
        **common,
    )
    common |= {"softmax": softmax, "bias": bias, "groups": groups, "normalize": normalized}
    scores, chosen = choose_experts(logits, topk, scale=2.5, **common)
    found = torch.zeros_like(logits).scatter_(1, chosen, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (expected != 0).sum() == 33 * topk


@dtypes
@pytest.mark.parametrize("tokens", [1, 3, 33, 140])
@pytest.mark.parametrize(("experts", "width"), [(16, 1024), (6, 1000), (256, 2304)])
def test_logits(dtype, tokens, experts, width):
    """Parts add up to the product in fp32, whatever lies beside the tokens."""
    x = random(tokens, width + 8, dtype=dtype)[:, :width]
    weight = random(experts, width, dtype=dtype)
    parts = partial_logits(x, weight)
    assert parts.shape[1:] == (tokens, experts) and parts.dtype == torch.float32
    assert len(parts) > 1
    assert error(parts.double().sum(0), x.double() @ weight.double().T) < 1e-6


def test_logits_of_nothing():
    assert partial_logits(random(0, 512), random(8, 512)).shape[1:] == (0, 8)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("parts", [2, 7])
def test_choice_of_parts(router, softmax, parts):
    """Megatron's choice by their sum."""
    experts, topk, groups, group_topk = router
    logits = random(parts, 7, experts)
    scores, chosen = choose_experts(
        *(logits, topk),
        softmax=softmax,
        bias=None,
        groups=groups,
        group_topk=group_topk,
        scale=2.5,
    )
    expected = topk_routing_with_score_function(
        *(logits.sum(0), topk),
        use_pre_softmax=softmax,
        num_groups=groups,
        group_topk=group_topk,
        scaling_factor=2.5,
        score_function="softmax" if softmax else "sigmoid",
    )[0]
    found = torch.zeros(7, experts, device=DEVICE).scatter_(1, chosen, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_choice_without_numbers():
    """NaN chooses experts that exist, of which none is read outside of the weights."""
    logits = torch.full((3, 24), torch.nan, device=DEVICE)
    _, chosen = choose_experts(
        logits, 6, softmax=False, bias=None, groups=8, group_topk=3, scale=None
    )
    assert ((chosen >= 0) & (chosen < 24)).all()
    assert all(len(set(row)) == 6 for row in chosen.tolist()), "no expert twice"


@pytest.mark.parametrize(("groups", "group_topk"), [(None, None), (4, 4)])
def test_choice_beside_a_nan(groups, group_topk):
    """Experts with a number come first, in their order."""
    logits = random(5, 24)
    logits[:, [0, 9, 23]] = torch.nan
    expected = logits.nan_to_num(-100.0).topk(6).indices
    _, chosen = choose_experts(
        *(logits, 6), softmax=False, bias=None, groups=groups, group_topk=group_topk, scale=None
    )
    assert torch.equal(chosen, expected)


@pytest.mark.parametrize("tokens", [1, 3, 33, 400])
@pytest.mark.parametrize(("count", "first"), [(16, None), (4, 4), (4, 12), (300, None)])
def test_order(tokens, count, first):
    """The rows that sorting gives, also on a rank with some of the experts."""
    experts = count if first is None else 16
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(experts, (tokens, 3), generator=generator)
    expected = PermutedTokens.of(chosen, count, first)
    found = PermutedTokens(*order_by_expert(chosen.to(DEVICE), count, first or 0))
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), tensor), name
        assert getattr(found, name).dtype == tensor.dtype, name
