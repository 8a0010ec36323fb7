"""Kernels of grouped experts against PyTorch in float64, in Triton's interpreter or on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from absorbed_mla.deepseek_router import topk_routing
from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens
from tests.support import world
from tests.support.backends import triton_interpreter
from tests.support.combinations import grid
from tests.support.numerics import random, relative_error

# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.moe.choice import choose_experts
    from absorbed_mla.kernels.moe.logits import partial_logits
    from absorbed_mla.kernels.moe.order import order_by_expert
    from absorbed_mla.kernels.moe.skinny_gemm import few_rows_product
    from absorbed_mla.kernels.moe.sums import summed
    from absorbed_mla.kernels.moe.swiglu import gated, swiglu

pytestmark = pytest.mark.usefixtures("interpreted")
DEVICE = world.device()
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 1e-6}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The rows behind the last one of each expert: of 4 experts, some without rows, and of other ranks.
ENDS = {"some": [0, 7, 7, 40], "many": [33, 34, 36, 40], "others": [1, 2, 3, 20], "none": [0] * 4}


def table(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


@grid(1, {"dtype": DTYPES, "ends": ENDS, "width": [96, 40]})
def test_swiglu(dtype, ends, width):
    x, probs = random(40, 2 * width, dtype=dtype), random(20, 2).abs()
    x[ends[-1] :] = torch.nan
    gate, up = x.double().chunk(2, -1)
    choices = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = F.silu(gate) * up * probs.double().flatten()[choices, None]
    found = swiglu(x, probs, choices, table(ends))
    assert relative_error(found[: ends[-1]], expected[: ends[-1]]) < BOUNDS[dtype]


@dtypes
def test_gated(dtype):
    """Of tokens that nobody routes."""
    x = random(5, 1, 80, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    found = gated(x)
    assert found.shape == (5, 1, 40)
    assert relative_error(found, F.silu(gate) * up) < BOUNDS[dtype]


def permuted(topk: int, count: int, first: int | None) -> PermutedTokens:
    """11 tokens' choices of 8 experts, of which this rank has some."""
    chosen = torch.stack([torch.randperm(8)[:topk] for _ in range(11)]).to(DEVICE)
    return PermutedTokens.of(chosen, count, first)


@dtypes
@pytest.mark.parametrize(("count", "first"), [(8, None), (4, 2)])
def test_sums(dtype, count, first):
    """Also where experts of other ranks were chosen: their rows hold anything."""
    rows, x = permuted(3, count, first), random(33, 72, dtype=dtype)
    x[int(rows.ends[-1]) :] = torch.nan
    expected = x.double().nan_to_num()[rows.places].sum(1)
    assert relative_error(summed(x, rows.places, rows.ends), expected) < BOUNDS[dtype]


@dtypes
@pytest.mark.parametrize("topk", [1, 2, 5, 8])
def test_sums_one_by_one(dtype, topk):
    """As adding rows to zeros, each rounded, which ``index_add_`` does."""
    rows, x = permuted(topk, 8, None), random(11 * topk, 72, dtype=dtype)
    expected = x.new_zeros(11, 72)
    for row, token in enumerate(rows.tokens.tolist()):
        expected[token] += x[row]
    assert torch.equal(summed(x, rows.places, rows.ends, one_by_one=True), expected)
    if topk > 2 and dtype == torch.bfloat16:
        assert not torch.equal(summed(x, rows.places, rows.ends), expected)


@grid(2, {"dtype": DTYPES, "ends": ENDS, "shape": [(128, 256), (72, 136)], "taken": [0, 1]})
def test_few_rows(dtype, ends, shape, taken):
    """Also of rows that lie elsewhere, some of them several times."""
    columns, summands = shape
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
        assert relative_error(found[begin:end], expected) < BOUNDS[dtype]


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


SCORES = {"softmax": (True, False), "sigmoid": (False, False), "biased": (False, True)}


def check_choice(judge, logits, parts, routing, ours=None, theirs=None):
    """The experts and scores of a router of Megatron's signature, with more options of each."""
    topk, groups, softmax, biased, scale = routing
    common = {"group_topk": groups[1]}
    bias = random(logits.shape[-1], seed=1) / 4 if biased else None
    expected, _ = judge(
        *(logits, topk),
        use_pre_softmax=softmax,
        num_groups=groups[0],
        scaling_factor=scale,
        score_function="softmax" if softmax else "sigmoid",
        expert_bias=bias,
        **common,
        **(theirs or {}),
    )
    common |= {"softmax": softmax, "bias": bias, "groups": groups[0], "scale": scale}
    scores, chosen = choose_experts(parts, topk, **common, **(ours or {}))
    assert chosen.shape == scores.shape == (len(logits), topk)
    found = torch.zeros_like(logits).scatter_(1, chosen, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (expected != 0).sum() == len(logits) * topk


@grid(1, {"router": ROUTERS, "scores": SCORES, "summed": [(1, None), (2, 2.5), (7, None)]})
def test_choice(router, scores, summed):
    """Megatron's, also by the sum of parts."""
    (experts, topk, *groups), (softmax, biased), (parts, scale) = router, scores, summed
    given = random(parts, 7, experts)
    logits, given = given.sum(0), given if parts > 1 else given[0]
    judge = topk_routing_with_score_function
    check_choice(judge, logits, given, (topk, groups, softmax, biased, scale))


# Experts, K, groups, groups that a token may choose from, experts that rank a group.
RANKED = {
    "V2": (160, 6, 8, 3, 1),
    "V3": (48, 6, 4, 2, 2),
    "one": (24, 1, 8, 3, 2),
    "no groups": (24, 3, None, None, None),
}


@grid(2, {"normalized": [False, True], "scores": SCORES, "router": RANKED})
def test_choice_as_models_rank_and_normalise(router, scores, normalized):
    """That of ``topk_routing``, whose judge is float64."""
    (experts, topk, *groups, of_group), (softmax, biased) = router, scores
    logits, ranked = random(33, experts), {"group_score_topk": of_group}
    ours, theirs = ranked | {"normalize": normalized}, ranked | {"norm_topk_prob": normalized}
    routing = topk, groups, softmax, biased, 2.5
    check_choice(topk_routing, logits, logits, routing, ours, theirs)


@grid(
    1, {"dtype": DTYPES, "tokens": [1, 3, 33, 140], "sizes": [(16, 1024), (6, 1000), (256, 2304)]}
)
def test_logits(dtype, tokens, sizes):
    """Parts add up to the product in fp32, whatever lies beside the tokens."""
    experts, width = sizes
    x = random(tokens, width + 8, dtype=dtype)[:, :width]
    weight = random(experts, width, dtype=dtype)
    parts = partial_logits(x, weight)
    assert parts.shape[1:] == (tokens, experts) and parts.dtype == torch.float32
    assert len(parts) > 1
    assert relative_error(parts.double().sum(0), x.double() @ weight.double().T) < 1e-6


def test_logits_of_nothing():
    assert partial_logits(random(0, 512), random(8, 512)).shape[1:] == (0, 8)


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


@grid(1, {"tokens": [1, 3, 33, 400], "own": [(16, None), (4, 4), (4, 12), (300, None)]})
def test_order(tokens, own):
    """The rows that sorting gives, also on a rank with some of the experts."""
    count, first = own
    experts = count if first is None else 16
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.randint(experts, (tokens, 3), generator=generator)
    expected = PermutedTokens.of(chosen, count, first)
    found = PermutedTokens(*order_by_expert(chosen.to(DEVICE), count, first or 0))
    for name, tensor in vars(expected).items():
        assert torch.equal(getattr(found, name).cpu(), tensor), name
        assert getattr(found, name).dtype == tensor.dtype, name
