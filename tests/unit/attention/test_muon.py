"""Muon, written from its papers, on the attention: what ``muon_kv_up`` makes of its updates.

If these fail, K and V up-projections train at other rates than in standard MLA, without a word.
"""

import copy
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.log_once import times_logged
from absorbed_mla.muon import follow_kv_up_marks
from absorbed_mla.muon.orthogonalization_groups import ATTRIBUTE, Combined, orthogonalization_groups
from tests.support import world
from tests.support.cases import TINY, config_for, random_weights
from tests.support.harness import PARAMETERS, Setup
from tests.support.muon import ReferenceMuon, update_of
from tests.support.numerics import relative_error
from tests.support.refusal import refusal
from tests.support.standard import KV_UP, build_standard, interleave_heads, separate_heads
from tests.unit.attention.test_options import attention_spec

FP32 = Setup(dtype=torch.float32)
K_UP, V_UP = "linear_k_up_proj.weight", "linear_v_up_proj.weight"
LR = 0.02
MUON_PAGE = Path(__file__).resolve().parents[3] / "docs" / "muon.md"
# Of every matrix by its name in the standard.
Tensors = dict[str, Tensor]


def absorbed(choice: str = "combined") -> nn.Module:
    config = config_for(TINY, torch.float32)
    spec = attention_spec(config, muon_kv_up=choice)
    return build_module(spec, config=config, layer_number=1).to(world.device())


def matrices(attention: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in attention.named_parameters() if p.ndim == 2}


def random_matrices(seed: int) -> Tensors:
    named = {PARAMETERS[n][0][0]: w.float() for n, w in random_weights(TINY, seed).items()}
    named[KV_UP] = interleave_heads(TINY, named.pop(K_UP), named.pop(V_UP))
    return {name: tensor for name, tensor in named.items() if tensor.ndim == 2}


def as_named_there(attention: nn.Module, whole: Tensors) -> Tensors:
    """With the combined matrix apart, if the attention has it so."""
    if not hasattr(attention, "linear_k_up_proj"):
        return whole
    others = {name: tensor for name, tensor in whole.items() if name != KV_UP}
    return others | dict(zip((K_UP, V_UP), separate_heads(TINY, whole[KV_UP])))


def optimizer_of(attention: nn.Module, kind=ReferenceMuon, **options) -> torch.optim.Optimizer:
    """Of an attention with weights that all have in common; it follows the marks."""
    for name, weight in as_named_there(attention, random_matrices(0)).items():
        matrices(attention)[name].data.copy_(weight)
    optimizer = kind(list(matrices(attention).values()), lr=LR, **options)
    if hasattr(attention, "linear_k_up_proj"):
        follow_kv_up_marks(optimizer)
    return optimizer


def set_gradients(attention: nn.Module, seed: int) -> None:
    for name, gradient in as_named_there(attention, random_matrices(seed)).items():
        weight = matrices(attention)[name]
        weight.grad = gradient.to(weight.device, copy=True)


def weights_of(attention: nn.Module) -> Tensors:
    named = {name: p.detach().clone() for name, p in matrices(attention).items()}
    if K_UP in named:
        named[KV_UP] = interleave_heads(TINY, named.pop(K_UP), named.pop(V_UP))
    return named


def take_steps(attention: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        set_gradients(attention, seed)
        optimizer.step()


def trained(attention: nn.Module, kind=ReferenceMuon) -> Tensors:
    take_steps(attention, optimizer_of(attention, kind), 1, 2, 3)
    return weights_of(attention)


def assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("kind", [ReferenceMuon, torch.optim.Muon])
def test_combined_is_the_standard_update(kind):
    """Of every matrix: the down-projections are the standard's, [latent | k_rope] rows and all."""
    expected = trained(build_standard(TINY, FP32), kind)
    assert KV_UP in expected and "linear_kv_down_proj.weight" in expected
    assert_equal(trained(absorbed(), kind), expected)
    with pytest.raises(AssertionError, match=KV_UP):
        assert_equal(trained(absorbed("split"), kind), expected)


@pytest.mark.parametrize(
    "choice, rows", [("split", {K_UP: None, V_UP: None}), ("per_head", {K_UP: 12, V_UP: 20})]
)
def test_each_matrix_is_orthogonalised_alone(choice, rows):
    attention = absorbed(choice)
    optimizer = optimizer_of(attention, decay=0.0)
    set_gradients(attention, 1)
    for name, height in rows.items():
        weight = matrices(attention)[name]
        blocks = weight.grad.split(height or weight.shape[0])
        rows[name] = weight.detach() - LR * torch.cat([update_of(block) for block in blocks])
    optimizer.step()
    for name, expected in rows.items():
        torch.testing.assert_close(matrices(attention)[name].data, expected, rtol=0, atol=1e-6)


def test_the_table_of_the_docs():
    """Of updates of random gradients at Moonlight's dimensions: K and V, apart and together."""
    rows = re.findall(r"^\| \d.*", MUON_PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 3
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(16 * 128, 512, generator=generator) for _ in range(2))
    both = Combined([], (128, 128))
    # Apart, the size of a gradient makes no difference.
    split = [update_of(gradient) for gradient in (k, v)]
    heads = [torch.cat([update_of(x) for x in gradient.split(128)]) for gradient in (k, v)]
    for row in rows:
        ratio, *said = (float(number) for number in re.findall(r"[\d.]+", row))
        combined = both.split([update_of(both.join((k, ratio * v))[0])])
        sizes = [x.square().mean().sqrt() for choice in (combined, split, heads) for x in choice]
        apart = [relative_error(torch.cat(x), torch.cat(combined)) for x in (split, heads)]
        assert [float(size) for size in sizes] == pytest.approx(said[:6], abs=2e-3)
        assert apart == pytest.approx(said[6:], abs=1e-2)


@pytest.mark.parametrize("choice", ["combined", "per_head"])
def test_its_state_is_loaded(choice):
    """It belongs to the weights, each with the rows of its own."""
    attention = absorbed(choice)
    optimizer = optimizer_of(attention)
    take_steps(attention, optimizer, 1, 2)
    named = matrices(attention)
    assert len(optimizer.state) == len(named)
    assert all(optimizer.state[p]["momentum"].shape == p.shape for p in named.values())
    assert {float(optimizer.state[p]["step"]) for p in named.values()} == {2.0}
    assert optimizer.param_groups[0]["steps"] == 2
    other = absorbed(choice)
    resumed = optimizer_of(other)
    other.load_state_dict(attention.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(attention, optimizer, 3)
    take_steps(other, resumed, 3)
    assert_equal(weights_of(other), weights_of(attention))
    assert_equal(weights_of(other), trained(absorbed(choice)))


def test_following_twice_and_schedules():
    """PyTorch's schedulers wrap the step themselves."""
    attention = absorbed()
    optimizer = optimizer_of(attention)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    follow_kv_up_marks(optimizer)
    for number in range(3):
        set_gradients(attention, 1 + number)
        assert optimizer.step(lambda: 5.0) == 5.0
        schedule.step()
    assert_equal(weights_of(attention), trained(build_standard(TINY, FP32)))


def test_missing_gradients():
    """One that is missing counts as zero, as in standard MLA; without both nothing changes."""
    attention, standard = absorbed(), build_standard(TINY, FP32)
    for each in (attention, standard):
        optimizer = optimizer_of(each)
        set_gradients(each, 1)
        named = matrices(each)
        if each is attention:
            named[K_UP].grad = None
        else:
            no_keys = torch.zeros_like(separate_heads(TINY, named[KV_UP].grad)[0])
            values = separate_heads(TINY, named[KV_UP].grad)[1]
            named[KV_UP].grad = interleave_heads(TINY, no_keys, values)
        optimizer.step()
    assert_equal(weights_of(attention), weights_of(standard))
    optimizer = optimizer_of(attention)
    optimizer.zero_grad()
    before = weights_of(attention)
    optimizer.step()
    assert_equal(weights_of(attention), before)
    assert not optimizer.state


def test_a_step_that_fails_leaves_the_optimizer_as_it_was():
    class Failing(ReferenceMuon):
        def _update(self, matrix, group):
            if matrix.shape[0] == TINY.heads * (TINY.nope + TINY.v):
                self.state[matrix]["half"] = 1
                raise FloatingPointError("not finite")

    attention = absorbed()
    optimizer = optimizer_of(attention, Failing)
    params = list(optimizer.param_groups[0]["params"])
    set_gradients(attention, 1)
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert not any(optimizer.state.values())


def test_marks_are_kept_when_weights_are_replaced():
    attention = absorbed("per_head")
    attention.load_state_dict(copy.deepcopy(attention.state_dict()), assign=True)
    marks = [getattr(matrices(attention)[name], ATTRIBUTE) for name in (K_UP, V_UP)]
    assert [mark.part for mark in marks] == [0, 1]
    assert marks[0].layer is marks[1].layer
    assert marks[0].layer.update == "per_head"
    assert marks[0].layer.head_dims == (TINY.nope, TINY.v)


class TestRefusals:
    def test_unknown_choice(self):
        for value in ("fused", None):
            with refusal("muon_kv_up", "auto, combined, split, per_head", repr(value)):
                AbsorbedMLAOptions(muon_kv_up=value)

    def test_another_models_optimizer(self):
        with refusal("optimizer must have the linear_k_up_proj", "without"):
            follow_kv_up_marks(ReferenceMuon(matrices(build_standard(TINY, FP32)).values()))

    def test_one_without_the_other(self):
        kept = [p for name, p in matrices(absorbed()).items() if name != V_UP]
        with refusal("muon_kv_up='combined'", "one without the other", "'split' or 'per_head'"):
            follow_kv_up_marks(ReferenceMuon(kept))

    def test_two_groups(self):
        attention = absorbed()
        k, v = (matrices(attention)[name] for name in (K_UP, V_UP))
        optimizer = ReferenceMuon([{"params": [k]}, {"params": [v], "lr": 0.1}])
        follow_kv_up_marks(optimizer)
        set_gradients(attention, 1)
        with refusal("in one parameter group", "got one without the other"):
            optimizer.step()

    def test_states_that_cannot_be_taken_apart(self):
        class ByColumn(ReferenceMuon):
            def _update(self, matrix, group):
                self.state[matrix]["columns"] = matrix.grad.square().mean(0)

        attention = absorbed()
        optimizer = optimizer_of(attention, ByColumn)
        set_gradients(attention, 1)
        with refusal("128 rows", "got (24,) for 'columns'", "muon_kv_up='split'"):
            optimizer.step()


@pytest.mark.parametrize("missing", ["registry", "name", "class"])
class TestAMegatronWithAnotherRegistry:
    @pytest.fixture(autouse=True)
    def other(self, missing, monkeypatch):
        from megatron.core.optimizer import emerging_optimizers

        times_logged.cache_clear()
        if missing == "registry":
            monkeypatch.delattr(emerging_optimizers, "_EMERGING_OPTIMIZERS")
        elif missing == "name":
            monkeypatch.delitem(emerging_optimizers._EMERGING_OPTIMIZERS, "muon")
        else:
            entry = emerging_optimizers._EMERGING_OPTIMIZERS["muon"]
            monkeypatch.delattr(entry, "optimizer_cls")

    def test_by_default_the_attention_is_built(self, caplog):
        """Most models are trained by another optimizer."""
        with caplog.at_level(logging.INFO):
            absorbed("auto")
            absorbed("auto")
        assert caplog.text.count("Megatron's Muon does not follow muon_kv_up") == 1

    def test_a_choice_is_refused(self):
        for choice in ("combined", "per_head"):
            with refusal(f"muon_kv_up={choice!r}", "another registry", "'auto' or 'split'"):
                absorbed(choice)
        absorbed("split")


def test_a_megatron_without_muon(monkeypatch):
    """A program's own optimizer follows any choice."""
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.emerging_optimizers", None)
    absorbed("per_head")


def test_auto_is_combined():
    attention = absorbed("auto")
    mark = getattr(attention.linear_k_up_proj.weight, ATTRIBUTE)
    weights = {0: attention.linear_k_up_proj.weight, 1: attention.linear_v_up_proj.weight}
    assert [type(one) for one in orthogonalization_groups(mark.layer, weights)] == [Combined]
