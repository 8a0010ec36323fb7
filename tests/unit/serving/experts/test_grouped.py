"""Grouped experts: what Megatron's experts give, from the same parameters, without a sync."""

import collections

import pytest
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.utils._python_dispatch import TorchDispatchMode

from absorbed_mla.serving.experts import router as router_module
from absorbed_mla.serving.experts.experts import GroupedExperts
from absorbed_mla.serving.experts.permuted_tokens import PermutedTokens
from absorbed_mla.serving.experts.product import grouped_product, why_not_grouped
from absorbed_mla.serving.export import hf_weights
from tests.support import needs
from tests.support.experts import FEW, ROUTED, grouped_model, pair
from tests.support.models import gpt_model, logits

pytestmark = needs.no_gpu


def mlp_of(model, layer: int = 1):
    return model.decoder.layers[layer].mlp


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("first, count", [(0, 6), (2, 3), (5, 1)])
def test_rows(tokens, first, count):
    """By what they are: every choice once, sorted, and its row's place."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, 6, generator=generator).topk(2).indices
    rows = PermutedTokens.of(chosen, count, None if count == 6 else first)
    pairs = [(e, c) for c, e in enumerate(chosen.flatten().tolist())]
    own = sorted(pair for pair in pairs if first <= pair[0] < first + count)
    assert rows.choices.tolist()[: len(own)] == [choice for _, choice in own]
    assert rows.choices.sort().values.tolist() == list(range(2 * tokens))
    assert rows.choices[rows.places.flatten()].tolist() == list(range(2 * tokens))
    ends = [sum(e <= first + i for e, _ in own) for i in range(count)]
    assert rows.ends.tolist() == ends and rows.ends.dtype == torch.int32
    x = torch.randn(tokens, 4)
    of_rows = x[rows.tokens]
    # Those of other ranks may hold anything, and count for nothing.
    of_rows[len(own) :] = torch.nan
    counted = [sum(choice // 2 == token for _, choice in own) for token in range(tokens)]
    assert torch.equal(rows.summed(of_rows), x * torch.tensor(counted).view(-1, 1))
    values = torch.randn(tokens, 2)
    assert torch.equal(rows.choices_of(values)[rows.places], values)


def test_product():
    """Also of experts without rows; PyTorch's own operator agrees on a CPU."""
    rows, weights = torch.randn(12, 16), torch.randn(4, 24, 16)
    ends = torch.tensor([5, 5, 9, 12], dtype=torch.int32)
    found = grouped_product(rows, weights, ends)
    parts = [(0, 0, 5), (2, 5, 9), (3, 9, 12)]
    expected = torch.cat([rows[a:b] @ weights[e].T for e, a, b in parts])
    assert torch.equal(found, expected)
    tokens = torch.randint(5, (12,))
    taken = grouped_product(rows[:5], weights, ends, tokens)
    assert torch.equal(taken, grouped_product(rows[tokens], weights, ends))
    theirs = torch._grouped_mm(rows.bfloat16(), weights.bfloat16().transpose(1, 2), offs=ends)
    torch.testing.assert_close(theirs.float(), expected, atol=0.2, rtol=0.02)


def test_equal_to_the_bit():
    """Sums of two experts are the same in any order."""
    sequential, grouped = pair(**FEW)
    assert isinstance(mlp_of(grouped).experts, GroupedExperts)
    assert type(mlp_of(sequential).experts) is SequentialMLP
    assert torch.equal(logits(grouped), logits(sequential))


def test_initial_values():
    """Those of Megatron's experts from the same seed."""
    sequential, grouped = (
        mlp_of(model).experts for model in (gpt_model(**FEW), grouped_model(**FEW))
    )
    for wanted, found in zip(sequential.parameters(), grouped.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "pre_softmax"])
def test_routing(score):
    """Groups of experts, a bias that only chooses, scaled probabilities."""
    fields = dict(ROUTED)
    if score != "sigmoid":
        fields |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
        fields["moe_router_pre_softmax"] = score == "pre_softmax"
    sequential, grouped = pair(**fields)
    with torch.no_grad():
        x = torch.randn(40, 3, sequential.config.hidden_size)
        expected, _ = mlp_of(sequential)(x)
        found, bias = mlp_of(grouped)(x)
    assert bias is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # The bias is one: without it the results are others.
    if score == "sigmoid":
        mlp_of(grouped).router.expert_bias.zero_()
        assert not torch.allclose(mlp_of(grouped)(x)[0], expected, rtol=1e-2, atol=1e-3)


def test_a_token_alone():
    """No token's result depends on the others, but for rounding; none is dropped."""
    _, grouped = pair(**ROUTED)
    with torch.no_grad():
        x = torch.randn(30, 1, grouped.config.hidden_size)
        whole, _ = mlp_of(grouped)(x)
        alone = torch.cat([mlp_of(grouped)(one)[0] for one in x.split(1)])
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)


def test_padding_of_megatron_changes_nothing():
    """Megatron switches it on in steps of graphs where ranks have their own experts."""
    from megatron.core.inference import utils

    _, grouped = pair(**FEW)
    expected = logits(grouped)
    utils.moe_layer_cache = None
    try:
        utils.set_decode_expert_padding(grouped, True, capacity_factor=0.01)
        assert torch.equal(logits(grouped), expected)
    finally:
        utils.set_decode_expert_padding(grouped, False)
        utils.moe_layer_cache = None


class TestWeights:
    """They are the parameters of Megatron's experts, whoever sets them."""

    def test_set_in_place(self):
        sequential, grouped = pair(**FEW)
        for model in (sequential, grouped):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if ".local_experts.2." in name:
                        weight.mul_(-1.5)
        assert torch.equal(logits(grouped), logits(sequential))

    def test_cast(self):
        sequential, grouped = pair(**FEW)
        for model in (sequential, grouped):
            model.double().config.params_dtype = torch.float64
        for expert in mlp_of(grouped).experts.local_experts:
            assert expert.linear_fc1.weight.dtype == torch.float64
        x = torch.randn(5, 2, grouped.config.hidden_size, dtype=torch.float64)
        with torch.no_grad():
            assert torch.equal(mlp_of(grouped)(x)[0], mlp_of(sequential)(x)[0])

    def test_given_other_memory(self):
        """As optimizers with one buffer for all parameters do."""
        sequential, grouped = pair(**FEW)
        for model in (sequential, grouped):
            for name, weight in model.named_parameters():
                if ".experts." in name:
                    weight.data = weight.data * 2
        assert torch.equal(logits(grouped), logits(sequential))

    def test_exported(self):
        sequential, grouped = pair(**FEW, moe_router_pre_softmax=True)
        expected = dict(hf_weights(sequential))
        found = dict(hf_weights(grouped))
        assert found.keys() == expected.keys() and any(".experts.3." in name for name in found)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"add_bias_linear": True}, "need add_bias_linear False, got True"),
        ({"activation_func_clamp_value": 7.0}, "need activation_func_clamp_value None, got 7.0"),
        ({"glu_linear_offset": 1.0}, "need glu_linear_offset 0.0, got 1.0"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "got 'sinkhorn'"),
    ],
)
def test_refused(fields, error):
    with pytest.raises(ValueError, match=error):
        grouped_model(**{**FEW, **fields})


def test_training_is_refused():
    _, grouped = pair(**FEW)
    with pytest.raises(ValueError, match="are for inference"):
        mlp_of(grouped.train())(torch.randn(4, 1, grouped.config.hidden_size))


def test_where_it_runs(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_not_grouped(torch.device("cpu"), torch.float32, {"hidden_size": 3}) is None
    assert why_not_grouped(gpu, torch.bfloat16, {"hidden_size": 64}) is None
    assert "needs bfloat16" in why_not_grouped(gpu, torch.float32, {"hidden_size": 64})
    odd = why_not_grouped(gpu, torch.bfloat16, {"hidden_size": 64, "channels": 20})
    assert odd == "channels 20 must be a multiple of 8"
    assert why_not_grouped(gpu, torch.float16, {"channels": 20}, parity=True) is None
    refused = why_not_grouped(gpu, torch.float32, {}, parity=True)
    assert refused == "in parity mode a GPU needs bfloat16 or float16, not torch.float32"
    for number in (8, 16):
        mode = {"parity": True, "tensor_parallel_parts": number}
        refused = why_not_grouped(gpu, torch.bfloat16, {}, **mode)
        expected = "a GPU needs tensor_parallel_parts of at most 8, got 16"
        assert refused == (expected if number > 8 else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.0" in why_not_grouped(gpu, torch.bfloat16, {})


class Operators(TorchDispatchMode):
    """Counts the operators that are called, as one on a GPU would be launched."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def operators(layer, tokens: int) -> collections.Counter[str]:
    """How often a layer calls each operator of PyTorch."""
    x = torch.randn(tokens, 1, layer.config.hidden_size)
    with Operators() as found:
        layer(x)
    return found.counts


def test_no_work_per_expert_but_the_product(monkeypatch):
    """The host's work depends on neither experts nor tokens, and nothing is fetched to it."""
    product = lambda x, weights, ends, tokens=None, **_: x.new_zeros(  # noqa: E731
        len(x if tokens is None else tokens), weights.shape[1]
    )
    monkeypatch.setattr("absorbed_mla.serving.experts.experts.grouped_product", product)
    layers = [mlp_of(pair(**{**FEW, "num_moe_experts": count})[1]) for count in (4, 16)]
    counts = [operators(layer, tokens) for layer in layers for tokens in (8, 64)]
    assert counts[1:] == counts[:-1]
    fetching = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
    assert not fetching & counts[0].keys()


@pytest.mark.parametrize("normalised", [None, False])
def test_megatrons_function_chooses_where_no_option_does(monkeypatch, normalised):
    """Whatever a release of Megatron changes there, generation then does as training."""
    calls, original = [], router_module.topk_routing_with_score_function
    monkeypatch.setattr(
        router_module,
        "topk_routing_with_score_function",
        lambda *args, **fields: calls.append(fields) or original(*args, **fields),
    )
    router = mlp_of(grouped_model(**ROUTED)).router
    router.options = router.options.replace(moe_router_norm_topk_prob=normalised)
    values = torch.randn(5, 1, router.config.num_moe_experts)
    probs, chosen = router.routing(values)
    assert len(calls) == (normalised is None) and probs.shape == chosen.shape == (5, 3)
