"""The layer with sparse attention on one process: stages of training, recomputation, refusals."""

from dataclasses import replace

import pytest
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from megatron.core.transformer.spec_utils import build_module

from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.dsa.core_attention import SparseCoreAttention
from absorbed_mla.dsa.replay import record_selections, replay_selections
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec
from tests.oracle_dsa import OracleLoss
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.combinations import grid
from tests.support.dsa import TINY_DSA, VARIANTS, config_of, random_weights
from tests.support.dsa_layer import BOUND, build, check, evaluate, named, truth
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, grid_layout
from tests.support.numerics import compare
from tests.support.refusal import refusal
from tests.unit.inference.test_fp8_cache import FP8, WIDER, cached

SETUP = Setup(form="auto")
SPARSE, WARM_UP = OracleLoss(sparse=True), OracleLoss(sparse=False)
TE = needs.gpu_with("TransformerEngine", None if HAVE_TE else "it is not installed")
STAGES = {"sparse": SPARSE, "warm_up": WARM_UP}
stages = pytest.mark.parametrize("loss", STAGES.values(), ids=STAGES)


@grid(1, {"variant": [*VARIANTS], "layout": LAYOUTS, "loss": STAGES, "per_token": [False, True]})
def test_variants(variant, layout, loss, per_token):
    """Odd lengths, empty sequences; three heads of the indexer, so that many keys tie."""
    loss = replace(loss, coefficient=0.7, per_token=per_token)
    check(VARIANTS[variant], SETUP, grid_layout(layout, False), loss)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_selection_of_another_layer(layout):
    """Shared, or replayed: attention and loss over it, whatever this layer would choose."""
    layout = grid_layout(layout, False)
    weights, others = (random_weights(TINY_DSA, seed) for seed in (0, 5))
    attention, other = (build(TINY_DSA, SETUP, one, SPARSE) for one in (weights, others))
    with record_selections(other) as selections:
        evaluate(other, TINY_DSA, SETUP, layout)
    with replay_selections(attention, selections):
        found = named(evaluate(attention, TINY_DSA, SETUP, layout))
    own, theirs = (truth(attention, TINY_DSA, w, layout, SPARSE).chosen for w in (weights, others))
    assert any(not torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
    expected = named(truth(attention, TINY_DSA, weights, layout, SPARSE, chosen=theirs))
    compare(found, expected, {**dict.fromkeys(expected, BOUND), "loss": 1e-6}).check()


@pytest.mark.parametrize("backend", ["local", pytest.param("transformer_engine", marks=TE)])
def test_bf16(backend):
    """Nothing is chosen."""
    setup = replace(SETUP, dtype=torch.bfloat16, backend=backend)
    layout = grid_layout("thd", False)
    check(VARIANTS["topk_above"], setup, layout, WARM_UP, dense=True, bound=0.05)


@pytest.mark.parametrize("module", ["mla_up_proj", "core_attn"])
@stages
def test_recomputation(loss, module):
    setup = replace(SETUP, recompute=(module,))
    check(TINY_DSA, setup, grid_layout("thd_padded", False), loss)


@stages
def test_latents_as_an_fp8_cache_returns_them(loss):
    """Attention and target are over rounded latents, with straight-through gradients."""
    dsa = replace(TINY_DSA, mla=replace(WIDER, cached=cached))
    setup = replace(SETUP, recompute=("mla_up_proj",), **FP8)
    check(dsa, setup, grid_layout("thd_padded", False), loss)


@pytest.mark.parametrize("coefficient", [None, 0.0])
def test_no_loss(coefficient):
    """The indexer chooses, and does not learn."""
    layout = grid_layout("sbhd", False)
    weights = random_weights(TINY_DSA)
    attention = build(TINY_DSA, SETUP, weights, dsa_indexer_loss_coeff=coefficient)
    assert type(attention.core_attention) is SparseCoreAttention
    x = layout.random_rows(TINY_DSA.hidden, seed=1).to(world.device()).requires_grad_()
    output, _ = attention(x, None)
    output.sum().backward()
    assert all(p.grad is None for p in attention.core_attention.indexer.parameters())
    expected = truth(attention, TINY_DSA, weights, layout, None).output
    compare({"output": output.flatten(0, 1)}, {"output": expected}, BOUND).check()


class TestWarmUp:
    """Dense attention of a frozen model, whose indexers learn from all visible keys."""

    DSA = VARIANTS["topk_above"]

    @pytest.mark.parametrize("recompute", [(), ("mla_up_proj", "core_attn")], ids=["", "recompute"])
    def test_only_the_indexer_learns(self, recompute):
        layout, weights = grid_layout("sbhd", False), random_weights(self.DSA)
        setup = replace(SETUP, recompute=recompute)
        attention = build(self.DSA, setup, weights, WARM_UP)
        indexer = dict(attention.core_attention.indexer.named_parameters())
        for parameter in attention.parameters():
            parameter.requires_grad_(any(parameter is p for p in indexer.values()))
        x = layout.random_rows(self.DSA.hidden, seed=1).to(world.device())
        DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(1.0))
        attention(x, None)[0].sum().backward()
        expected = truth(attention, self.DSA, weights, layout, WARM_UP, dense=True).weight_grads
        assert all(p.grad is None for p in attention.parameters() if not p.requires_grad)
        found = {"i_wq": "linear_wq_b.weight", "i_k_bias": "k_norm.bias"}
        for name, its in found.items():
            compare({name: indexer[its].grad}, {name: expected[name]}, BOUND).check()

    def test_nothing_is_chosen(self, monkeypatch):
        """No [S, topk] tensor, and the dense layer's backends."""
        layout, weights = grid_layout("sbhd", False), random_weights(self.DSA)
        attention = build(self.DSA, SETUP, weights, WARM_UP)
        plans = []
        forward = LatentCoreAttention.forward
        monkeypatch.setattr(
            LatentCoreAttention,
            "forward",
            lambda self, plan, *args: (plans.append(plan), forward(self, plan, *args))[1],
        )
        evaluate(attention, self.DSA, SETUP, layout)
        assert plans[0].chosen is None and plans[0].backend.name == "reference"


def test_evaluation_reports_nothing():
    layout, weights = grid_layout("sbhd", False), random_weights(TINY_DSA)
    attention = build(TINY_DSA, SETUP, weights, SPARSE)
    x = layout.random_rows(TINY_DSA.hidden, seed=1).to(world.device())
    DSAIndexerLossLoggingHelper.tracker.clear()
    with torch.no_grad():
        first, _ = attention(x, None)
    second, _ = attention.eval()(x, None)
    assert DSAIndexerLossLoggingHelper.tracker == {}
    assert torch.equal(first, second)
    expected = truth(attention, TINY_DSA, weights, layout, None).output
    compare({"output": first.flatten(0, 1)}, {"output": expected}, BOUND).check()


def test_one_step_twice():
    """Nothing of a forward is left for the next one."""
    layout, weights = grid_layout("thd", False), random_weights(TINY_DSA)
    attention = build(TINY_DSA, SETUP, weights, SPARSE)
    found = []
    for _ in range(2):
        attention.zero_grad()
        found.append(named(evaluate(attention, TINY_DSA, SETUP, layout)))
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"dsa_kernel_backend": "tilelang"}, ("dsa_kernel_backend='tilelang'", "'none'")),
            ({"attention_dropout": 0.1}, ("attention_dropout=0.1", "0.0")),
            ({"log_max_attention_logit": True}, ("log_max_attention_logit=True", "False")),
            ({"dsa_indexer_topk": None}, ("dsa_indexer_topk", "at least 1", "None")),
        ],
        ids=str,
    )
    def test_config(self, changes, parts):
        config = config_of(TINY_DSA)
        for name, value in changes.items():
            setattr(config, name, value)
        spec = get_absorbed_mla_layer_spec(config, backend="local").submodules.self_attention
        with refusal(*parts):
            build_module(spec, config=config, layer_number=1)

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"form": "expanded"}, ("form", "auto or absorbed", "'expanded'")),
            ({"cp_comm_type": "p2p"}, ("cp_comm_type", "all_gather", "'p2p'")),
            ({"mask_type": AttnMaskType.no_mask}, ("causal attn_mask_type",)),
            ({"latent_cache_tokens": 4}, ("latent_cache_tokens must be None", "got 4")),
        ],
        ids=str,
    )
    def test_setup(self, changes, parts):
        with refusal(*parts):
            build(TINY_DSA, replace(SETUP, **changes), random_weights(TINY_DSA))

    def test_a_spec_of_another_variant(self):
        """A dense spec would leave the config's indexer out in silence."""
        dense, sparse = config_for(TINY), config_of(TINY_DSA)
        for one, other in ((dense, sparse), (sparse, dense)):
            spec = get_absorbed_mla_layer_spec(one, backend="local").submodules.self_attention
            with refusal("experimental_attention_variant", "build the spec with this config"):
                build_module(spec, config=other, layer_number=1)

    def test_mask_that_hides_more_than_later_keys(self):
        attention = build(TINY_DSA, SETUP, random_weights(TINY_DSA))
        x = torch.randn(4, 1, TINY_DSA.hidden, dtype=torch.float64).to(world.device())
        hidden = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=world.device())
        expected, _ = attention(x, None)
        found, _ = attention(x, hidden.triu(1))
        assert found.equal(expected)
        with refusal("attention_mask must be None", "sparse attention", "(1, 1, 4, 4)"):
            attention(x, hidden)
