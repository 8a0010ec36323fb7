"""TransformerEngine's fused attention as a backend: called as it is, merged, differentiated.

Without a GPU a stand-in with the signatures of release 2.12 computes in float64; on a GPU the
package itself runs as well.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.context_parallel import strategy
from absorbed_mla.core_attention import module as latent_attention
from absorbed_mla.core_attention.backend import (
    _BACKENDS,
    AttentionRequest,
    ReferenceBackend,
    examine,
)
from absorbed_mla.core_attention.backends import transformer_engine as backend
from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineAttention
from absorbed_mla.core_attention.key_source import LocalKeys
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.sequences import SequenceLayout
from tests.support import needs
from tests.support.backends import KernelCase, determinism, kernels_running
from tests.support.cases import INTERPRETED, config_for
from tests.support.execution import execute
from tests.support.fake_transformer_engine import install
from tests.support.layouts import LAYOUTS, dense, grid_layout, packed
from tests.support.numerics import bounds_from_eager, compare, relative_error
from tests.unit.core_attention.test_flash_attention import first_of
from tests.unit.core_attention.test_fused_attention import SPANS, operands
from tests.unit.core_attention.test_kernel_layer import Blocks, check

MORE_SPANS = {
    **SPANS,
    # Queries of one call lie between those of another one, both ways.
    "interleaved": (
        Span(0, 4, 0, 4, 0),
        Span(4, 8, 0, 9, None),
        Span(8, 12, 4, 8, 0),
        Span(12, 16, 9, 12, None),
    ),
    # cuDNN would see 12 queries and 8 keys.
    "wider_gap_of_queries": (Span(0, 2, 0, 4, 2), Span(10, 12, 5, 8, 1)),
    "bottom_right_pack": (Span(0, 3, 0, 9, 6), Span(5, 9, 12, 18, 2)),
    "nothing": (),
}


@pytest.fixture()
def fused(monkeypatch):
    backend.refusal.cache_clear()
    yield install(monkeypatch)
    backend.refusal.cache_clear()


def outcome(backend, leaves: list[Tensor], rules: ScoreRules, lse: bool = False) -> dict:
    """Output, LSE and gradients by name; the LSE has a gradient only if ``lse``."""
    given = AttentionInputs(*(x.detach() for x in leaves))
    attended = backend.forward(given, rules)
    attended = AttentionOutput(attended.out.to(given.value.dtype), attended.lse)
    generator = torch.Generator().manual_seed(3)
    grads = (torch.randn(x.shape, generator=generator).to(x) for x in attended)
    grad = OutputGradient(next(grads), next(grads) if lse else None)
    found = backend.backward(grad, attended, given, rules)
    seen = attended.lse.masked_fill(attended.lse == -torch.inf, -1e9)
    names = ("out", "lse", "dqc", "dqr", "dkc", "dkr", "dv")
    return dict(zip(names, (attended.out, seen, *found)))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MORE_SPANS)
def test_equals_the_reference(name, batch, lse, fused):
    rules, leaves = ScoreRules(0.3, MORE_SPANS[name], query_chunk_size=5), operands(torch.float64)
    leaves = first_of(leaves) if batch == 1 else leaves
    expected = outcome(ReferenceBackend(), leaves, rules, lse)
    actual = outcome(TransformerEngineAttention(), leaves, rules, lse)
    for key, tensor in expected.items():
        assert relative_error(actual[key].double(), tensor.double()) < 1e-6, key
    # Its backward knows no gradient of the LSE.
    functions = set() if name == "nothing" else {"forward"} if lse else {"forward", "backward"}
    assert {call.function for call in fused.calls} == functions


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("causal", 2, ["sbhd_sbhd_sbhd causal"]),
        ("all_keys", 1, ["sbhd_sbhd_sbhd no_mask"]),
        ("padding", 1, ["thd_thd_thd padding_causal"]),
        ("bottom_right_pack", 1, ["thd_thd_thd padding_causal_bottom_right"]),
        ("wider_gap_of_queries", 1, ["sbhd_sbhd_sbhd causal_bottom_right"] * 2),
    ],
)
def test_calls(name, batch, expected, fused):
    """A pack is one call, in TransformerEngine's own layout."""
    leaves = operands(torch.float64)
    leaves = first_of(leaves) if batch == 1 else leaves
    outcome(TransformerEngineAttention(), leaves, ScoreRules(0.3, MORE_SPANS[name]))
    assert [f"{call.layout} {call.mask}" for call in fused.calls] == 2 * expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("demanded", [True, False])
def test_settings_of_backward(demanded, dtype, fused):
    """Otherwise gradients differ from run to run, or are of another type."""
    with determinism(demanded):
        outcome(TransformerEngineAttention(), operands(dtype), ScoreRules(0.3, SPANS["causal"]))
    [call] = [call for call in fused.calls if call.function == "backward"]
    names = {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
    assert (call.deterministic, call.dtype) == (demanded, names[dtype])


CASE = KernelCase("expanded", "transformer_engine", INTERPRETED, torch.float32, "sbhd", False)


class TestLayer:
    @pytest.fixture(autouse=True)
    def _runs(self, fused, monkeypatch):
        found = (TransformerEngineAttention(), lambda request: None)
        monkeypatch.setitem(_BACKENDS, CASE.core_attention_backend, found)
        with kernels_running(CASE):
            yield
        assert {call.function for call in fused.calls} == {"forward", "backward"}

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
    def test_layer(self, recomputes, layout):
        setup = replace(CASE, recomputes=recomputes).setup()
        check(execute(CASE.mla, setup, grid_layout(layout, divisible=False)), CASE.dtype)

    @pytest.mark.parametrize("tokens", [dense(13, 2), packed((5, 1, 0, 7), (6, 3, 2, 9))])
    def test_blocks_of_keys(self, tokens, monkeypatch):
        """Context parallelism: backward gets the LSE over all blocks."""
        monkeypatch.setattr(strategy, "LocalKeys", Blocks)
        check(execute(CASE.mla, CASE.setup(), tokens), CASE.dtype)


REQUEST = AttentionRequest(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    key_width=192,
    value_width=128,
    latent=False,
    masked=False,
    dropout=False,
)


class TestRefusals:
    """Whatever is wrong is a reason: "auto" has other backends to take."""

    @pytest.fixture(autouse=True)
    def _hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        backend.refusal.cache_clear()
        yield
        backend.refusal.cache_clear()

    def reason(self, **change) -> str | None:
        return examine("transformer_engine", replace(REQUEST, **change))[1].get(
            "transformer_engine"
        )

    @pytest.mark.parametrize("demanded", [True, False])
    def test_none(self, fused, demanded):
        with determinism(demanded):
            assert self.reason() is None

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"device": torch.device("cpu")}, "needs a GPU"),
            ({"dtype": torch.float32}, "fp16 and bf16"),
            ({"latent": True}, "form='expanded'"),
            ({"masked": True}, "attention_mask"),
            ({"dropout": True}, "attention_dropout=0"),
            ({"value_width": 264}, "(192, 264) are not multiples of 8 up to 256"),
        ],
    )
    def test_request(self, fused, change, reason):
        assert reason in self.reason(**change)

    def test_older_gpu(self, fused, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert self.reason() == "it needs compute capability 9.0"

    def test_not_installed(self, monkeypatch):
        def absent(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", absent)
        assert self.reason() == "TransformerEngine is not installed"

    @pytest.mark.parametrize("version", ["2.11.1", "2.14.0", "1.13.0"])
    def test_another_version(self, monkeypatch, version):
        """Its functions take other arguments."""
        install(monkeypatch, version)
        assert f"{version} is installed" in self.reason()

    @pytest.mark.parametrize("version", ["2.12.0", "2.13.1", "2.12.0+abc"])
    def test_versions_taken(self, monkeypatch, version):
        install(monkeypatch, version)
        assert self.reason() is None

    @pytest.mark.parametrize("missing", ["transformer_engine_torch", backend._INTERFACE])
    def test_broken(self, fused, monkeypatch, missing):
        monkeypatch.setitem(sys.modules, missing, None)
        reason = self.reason()
        assert "2.12.0 cannot be imported" in reason and missing in reason

    def test_old_cudnn(self, monkeypatch):
        install(monkeypatch, cudnn=90600)
        assert self.reason() == "cuDNN 9.7 or newer is needed, TransformerEngine found 90600"

    @pytest.mark.parametrize(
        ("cudnn", "value_width", "packed", "refused"),
        [
            (91400, 192, True, True),
            (91400, 256, True, True),
            (91899, 136, True, True),
            (91400, 128, True, False),
            (91400, 192, False, False),
            (91900, 192, True, False),
        ],
    )
    def test_wrong_gradients_of_packs(self, cudnn, value_width, packed, refused, monkeypatch):
        """What an older cuDNN computes wrongly without a word, it is not asked."""
        install(monkeypatch, cudnn=cudnn)
        reason = self.reason(key_width=value_width, value_width=value_width, packed=packed)
        if not refused:
            assert reason is None
            return
        loaded = {91400: "9.14.0", 91899: "9.18.99"}[cudnn]
        assert f"TransformerEngine 2.12.0 loaded cuDNN {loaded}" in reason
        assert "cuDNN 9.19 or newer is needed" in reason and f"(here {value_width})" in reason

    def test_no_kernel(self, fused, monkeypatch):
        """The widths, layout, mask and determinism that TransformerEngine is asked about."""
        asked = []

        def choose(*what):
            asked.append(what)
            return fused.FusedAttnBackend["No_Backend" if len(asked) == 2 else _KERNELS]

        library = sys.modules["transformer_engine_torch"]
        monkeypatch.setattr(library, "get_fused_attn_backend", choose)
        with determinism(True):
            reason = self.reason()
        assert "(192, 128), layout thd_thd_thd, mask padding_causal_bottom_right" in reason
        assert all(what[12:14] == (192, 128) and what[-1] is True for what in asked)
        assert [what[1] for what in asked] == ["kBFloat16"] * 2


@pytest.mark.parametrize(
    ("layout", "cp_size", "batch", "expected"),
    [
        (SequenceLayout.dense(8), 1, 1, False),
        (SequenceLayout.dense(8), 2, 1, True),
        (SequenceLayout.dense(8), 2, 2, False),
        (SequenceLayout(8, (0, 3), (3, 5), (3, 5), packed=True), 1, 1, True),
    ],
)
def test_who_is_told_of_packs(layout, cp_size, batch, expected, monkeypatch):
    """Packs, and the two pieces that a context-parallel rank has of one sequence."""
    seen = []

    def choose(requests, *_):
        seen.extend(request.packed for request in requests.values())
        return "expanded", ReferenceBackend()

    monkeypatch.setattr(latent_attention, "choose", choose)
    config = config_for(INTERPRETED)
    dims = MLADims.from_config(config, 1)
    core = LatentCoreAttention(config, dims, AttnMaskType.causal, 0.2, AbsorbedMLAOptions())
    keys = LocalKeys(layout, causal=True)
    core.plan(keys, layout, cp_size, torch.zeros(8, batch, 32), None)
    assert seen == [expected] * 2


_KERNELS = "F16_arbitrary_seqlen"


def _why_not_on_this_machine() -> str | None:
    if not needs.HAS_GPU:
        return needs.NEEDS_GPU
    return backend.refusal(192, 128, torch.bfloat16, deterministic=False, packed=True)


@needs.gpu_with("TransformerEngine", _why_not_on_this_machine())
class TestOnAGPU:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize("name", MORE_SPANS)
    def test_layouts(self, name, batch, dtype):
        """No worse than three plain evaluations at the same precision."""
        widths = {"nope": 128, "rope": 64, "v": 128}
        rules = ScoreRules(1 / math.sqrt(192), MORE_SPANS[name])
        leaves = operands(dtype, widths=widths)
        leaves = first_of(leaves) if batch == 1 else leaves
        wide = [x.detach().double().requires_grad_() for x in leaves]
        exact = outcome(ReferenceBackend(), wide, rules)
        eager = outcome(ReferenceBackend(), leaves, rules)
        actual = outcome(TransformerEngineAttention(), leaves, rules)
        compare(actual, exact, bounds_from_eager(eager, exact, dtype)).check()

    def test_repeats_to_the_bit_where_it_must(self):
        leaves = operands(torch.bfloat16, widths={"nope": 128, "rope": 64, "v": 128})
        rules = ScoreRules(1 / math.sqrt(192), SPANS["causal"])
        with determinism(True):
            first, again = (outcome(TransformerEngineAttention(), leaves, rules) for _ in range(2))
        assert all(torch.equal(first[name], again[name]) for name in first)
