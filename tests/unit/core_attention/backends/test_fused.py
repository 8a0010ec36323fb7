"""Backends of the expanded form: cuDNN, FlashAttention-4 and TransformerEngine.

Without a GPU stand-ins with the signatures of the packages compute in float64; on a GPU the
packages themselves run as well.
"""

import math
from dataclasses import replace

import pytest
import torch

from absorbed_mla.core_attention.backends import flash_attention_4 as fa4
from absorbed_mla.core_attention.backends import transformer_engine as te
from absorbed_mla.core_attention.backends.cudnn import CudnnBackend
from absorbed_mla.core_attention.backends.flash_attention_4 import FlashAttention4Backend
from absorbed_mla.core_attention.backends.hopper_expanded import HopperExpandedBackend
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineBackend
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.varlen import varlen_calls
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs
from tests.support import needs, world
from tests.support.backends import determinism
from tests.support.differentiable import HEADS, NARROW, V3, operands, outcome
from tests.support.fake_packages import flash_attention_4, transformer_engine
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.numerics import bounds_from_eager, compare, relative_error
from tests.support.spans import SPANS


@pytest.fixture
def flash(monkeypatch):
    return flash_attention_4.install(monkeypatch)


@pytest.fixture
def fused(monkeypatch):
    te.why_not_installed.cache_clear()
    yield transformer_engine.install(monkeypatch)
    te.why_not_installed.cache_clear()


BACKENDS = {
    "cudnn": PlainCudnn(),
    "flash_attention_4": FlashAttention4Backend(),
    "transformer_engine": TransformerEngineBackend(),
}


@pytest.mark.parametrize("lse_weight", [0.0, 0.3])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", BACKENDS)
def test_equals_the_reference(name, spans, batch, lse_weight, flash, fused):
    """Output, LSE and gradients; accumulators are fp32, memory that nobody writes holds NaN."""
    rules, leaves = (
        ScoreRules(0.3, SPANS[spans], query_chunk_size=5),
        operands(torch.float64, batch),
    )
    expected = outcome(ReferenceBackend(), leaves, rules, lse_weight)
    actual = outcome(BACKENDS[name], leaves, rules, lse_weight)
    for key, tensor in expected.items():
        assert relative_error(actual[key].double(), tensor.double()) < 1e-6, key
    if name == "flash_attention_4":
        assert flash.calls == 2 * len(varlen_calls(rules.spans, batch == 1))
    if name == "transformer_engine" and spans != "nothing":
        # Its backward knows no gradient of the LSE.
        functions = {"forward"} if lse_weight else {"forward", "backward"}
        assert {call.function for call in fused.calls} == functions


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", BACKENDS)
def test_largest_scores(name, spans, batch, flash, fused):
    """Of each head, over what is in spans; the rest is the same with and without them."""
    leaves = operands(torch.float64, batch)
    results = []
    for backend in (ReferenceBackend(), BACKENDS[name]):
        heads = torch.full((HEADS + 1,), -torch.inf, dtype=torch.float64, device=world.device())
        found = MaxLogits(heads)
        rules = ScoreRules(0.3, SPANS[spans], first_head=1, query_chunk_size=5)
        recorded = outcome(backend, leaves, replace(rules, max_logits=found))
        without = outcome(backend, leaves, rules)
        for key, tensor in without.items():
            torch.testing.assert_close(recorded[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
        results.append(found.of_heads)
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    assert results[1][0] == -torch.inf


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("causal", 2, ["sbhd_sbhd_sbhd causal"]),
        ("square", 1, ["sbhd_sbhd_sbhd no_mask"]),
        ("padding", 1, ["thd_thd_thd padding_causal"]),
        ("bottom_right_pack", 1, ["thd_thd_thd padding_causal_bottom_right"]),
        ("wider_gap_of_queries", 1, ["sbhd_sbhd_sbhd causal_bottom_right"] * 2),
    ],
)
def test_calls_of_transformer_engine(name, batch, expected, fused):
    """A pack is one call, in TransformerEngine's own layout."""
    leaves = operands(torch.float64, batch)
    outcome(TransformerEngineBackend(), leaves, ScoreRules(0.3, SPANS[name]))
    assert [f"{call.layout} {call.mask}" for call in fused.calls] == 2 * expected


@pytest.mark.parametrize(
    ("demanded", "warn_only", "expected"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_repeats_to_the_bit_where_it_must(demanded, warn_only, expected, flash, fused):
    """Otherwise gradients differ from run to run, or cost more than they need to."""
    with determinism(demanded, warn_only):
        for backend in (FlashAttention4Backend(), TransformerEngineBackend()):
            outcome(backend, operands(torch.bfloat16), ScoreRules(0.3, SPANS["causal"]))
    assert flash.deterministic == {expected}
    assert fused.calls[-1].deterministic is expected


@pytest.mark.parametrize("name", ["BFloat16", "Float16"])
def test_type_of_transformer_engines_gradients(name, fused):
    leaves = operands(getattr(torch, name.lower()))
    outcome(TransformerEngineBackend(), leaves, ScoreRules(0.3, SPANS["causal"]))
    assert fused.calls[-1].dtype == f"k{name}"


def _transformer_engine_is_missing() -> str | None:
    if not needs.HAS_GPU:
        return needs.NEEDS_GPU
    return te.why_not_installed(192, 128, torch.bfloat16, deterministic=False, packed=True)


ON_A_GPU = {
    "cudnn": (CudnnBackend(), needs.gpu),
    "hopper_expanded": (HopperExpandedBackend(), needs.hopper),
    "flash_attention_4": (
        FlashAttention4Backend(),
        needs.gpu_with("flash-attn-4", fa4.why_not_installed(192, 128)),
    ),
    "transformer_engine": (
        TransformerEngineBackend(),
        needs.gpu_with("TransformerEngine", _transformer_engine_is_missing()),
    ),
}


def on_a_gpu(name: str, *values):
    """Test parameters that are skipped where the package of that backend cannot run."""
    backend, mark = ON_A_GPU[name]
    return pytest.param(backend, *values, marks=mark, id="-".join(map(str, (name, *values))))


def no_worse_than_pytorch(backend, spans, batch, widths, lse_weight, dtype) -> None:
    """At most three times the error of a plain evaluation at the same precision."""
    rules = ScoreRules(1 / math.sqrt(widths["nope"] + widths["rope"]), SPANS[spans])
    leaves = operands(dtype, batch, widths)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = outcome(ReferenceBackend(), wide, rules, lse_weight)
    eager = outcome(ReferenceBackend(), leaves, rules, lse_weight)
    actual = outcome(backend, leaves, rules, lse_weight)
    compare(actual, exact, bounds_from_eager(eager, exact, dtype)).check()


@pytest.mark.parametrize("backend", [on_a_gpu(name) for name in ON_A_GPU])
@pytest.mark.parametrize(
    ("batch", "dtype", "lse_weight"),
    [(1, torch.bfloat16, 0.0), (2, torch.bfloat16, 0.3), (1, torch.float16, 0.3)],
)
@pytest.mark.parametrize("spans", SPANS)
def test_on_a_gpu(backend, spans, batch, dtype, lse_weight):
    no_worse_than_pytorch(backend, spans, batch, V3, lse_weight, dtype)


@pytest.mark.parametrize("backend", [on_a_gpu(name) for name in ON_A_GPU])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spans", SPANS)
def test_largest_scores_on_a_gpu(backend, spans, batch):
    """Beside float64; by kernels, and by the search for those that return the LSE alone."""
    leaves = operands(torch.bfloat16, batch, V3)
    wide = [x.detach().double() for x in leaves]
    results = []
    for entry, tensors in ((ReferenceBackend(), wide), (backend, leaves)):
        kind = torch.promote_types(tensors[0].dtype, torch.float32)
        found = MaxLogits(torch.full((HEADS,), -torch.inf, dtype=kind, device=world.device()))
        with torch.no_grad():
            entry.forward(
                AttentionInputs(*tensors), ScoreRules(0.3, SPANS[spans], max_logits=found)
            )
        results.append(found.of_heads.double())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "widths"),
    [
        on_a_gpu("cudnn", NARROW),
        on_a_gpu("hopper_expanded", {"nope": 64, "rope": 32, "v": 64}),
        on_a_gpu("hopper_expanded", {"nope": 64, "rope": 64, "v": 128}),
        on_a_gpu("flash_attention_4", {"nope": 32, "rope": 32, "v": 64}),
        on_a_gpu("flash_attention_4", {"nope": 96, "rope": 32, "v": 128}),
    ],
)
def test_widths_on_a_gpu(backend, widths):
    no_worse_than_pytorch(backend, "zigzag", 1, widths, 0.3, torch.bfloat16)


@needs.gpu_with("TransformerEngine", _transformer_engine_is_missing())
def test_bits_repeat_on_a_gpu():
    leaves, rules = operands(torch.bfloat16, widths=V3), ScoreRules(0.07, SPANS["causal"])
    with determinism(True):
        first, again = (outcome(TransformerEngineBackend(), leaves, rules) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
