"""FlashAttention-3's forward over the latent as a backend, with this package's backward.

Without a GPU, operators with the signatures of the package and of vLLM's build compute in float64;
on a GPU with either of them it runs itself as well.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from absorbed_mla.context_parallel import strategy
from absorbed_mla.core_attention.backend import (
    _BACKENDS,
    AttentionRequest,
    ReferenceBackend,
    examine,
)
from absorbed_mla.core_attention.backends import flash_attention_3 as backend
from absorbed_mla.core_attention.backends.flash_attention_3 import FlashAttention3
from absorbed_mla.core_attention.latent_kernels import LatentKernelBackend
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.varlen import waves
from absorbed_mla.kernels import operators
from tests.support import needs
from tests.support.backends import KernelCase, determinism, kernels_running, triton_interpreter
from tests.support.cases import INTERPRETED
from tests.support.execution import execute
from tests.support.fake_flash_attention_3 import NAMESPACE, PACKAGE, VLLM, registered
from tests.support.hostile import Case, evaluate, named, poisoned_memory
from tests.support.layouts import LAYOUTS, dense, grid_layout, packed
from tests.support.numerics import relative_error
from tests.unit.core_attention.test_kernel_layer import Blocks, check

# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.triton.backward
    import absorbed_mla.kernels.triton.forward  # noqa: F401

SPANS = {
    "causal": (Span(0, 24, 0, 24, 0),),
    "all_keys": (Span(0, 24, 0, 32, None),),
    "bottom_right": (Span(0, 24, 0, 32, 8),),
    "pack": (Span(0, 5, 0, 5, 0), Span(5, 6, 5, 6, 0), Span(6, 24, 6, 24, 0)),
    "padding": (Span(0, 5, 0, 5, 0), Span(8, 17, 8, 17, 0)),
    "bottom_right_pack": (Span(0, 3, 0, 9, 6), Span(5, 9, 12, 18, 2)),
    "zigzag": (Span(0, 8, 0, 8, 0), Span(8, 16, 0, 32, 24), Span(16, 24, 3, 9, None)),
    # Queries of one call lie between those of another one, both ways.
    "interleaved": (
        Span(0, 4, 0, 4, 0),
        Span(4, 8, 0, 9, None),
        Span(8, 12, 4, 8, 0),
        Span(12, 16, 9, 12, None),
    ),
    "one_token": (Span(0, 1, 0, 1, 0),),
    "nothing": (),
}


def case_of(name: str, batch: int = 1, dtype: torch.dtype = torch.float32) -> Case:
    return Case(24, 32, SPANS[name], heads=3, batch=batch, content=256, rope=64, dtype=dtype)


@pytest.fixture(params=[PACKAGE, VLLM], ids=["package", "vllm"])
def calls(request, monkeypatch):
    monkeypatch.setattr(backend, "_NAMESPACES", (NAMESPACE,))
    with registered(request.param) as found:
        yield found


CPU = torch.device("cpu")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SPANS)
def test_forward(name, batch, calls):
    """What nobody writes is NaN: output, and the LSE between sequences."""
    case = case_of(name, batch)
    operands = case.operands(CPU)
    with poisoned_memory():
        actual = FlashAttention3().forward(operands, case.rules)
    exact = ReferenceBackend().forward(operands, case.rules)
    unseen = exact.lse == -torch.inf
    assert torch.equal(actual.lse == -torch.inf, unseen) and (actual.out[unseen] == 0).all()
    assert relative_error(actual.out, exact.out) < 1e-5
    assert relative_error(*(x.lse[~unseen] for x in (actual, exact))) < 1e-6
    assert len(calls.sequences) == batch * len(waves(case.spans, batch == 1))


def test_a_pack_is_one_call(calls):
    FlashAttention3().forward(case_of("padding").operands(CPU), case_of("padding").rules)
    assert calls.sequences == [2]


@pytest.mark.parametrize(("demanded", "expected"), [(False, "hopper"), (True, "triton")])
def test_whose_backward(demanded, expected, calls, monkeypatch):
    """The faster one is not deterministic."""
    case, asked = case_of("pack"), []
    operands, grad = case.operands(CPU), case.gradient(CPU)

    def recorded(*given):
        asked.append(given[-1])
        return operands.q_content, operands.q_rope, torch.zeros(32, 1, 320)

    monkeypatch.setattr(operators, "latent_attention_backward", recorded)
    attended = FlashAttention3().forward(operands, case.rules)
    with determinism(demanded), triton_interpreter():
        FlashAttention3().backward(grad, attended, operands, case.rules)
    assert asked == [expected]


@needs.no_gpu
@pytest.mark.parametrize("name", ["padding", "zigzag"])
def test_gradients(name, calls):
    """Of all operands, from the output and LSE that the operator gave."""
    case = case_of(name)
    operands, grad = case.operands(CPU), case.gradient(CPU)
    with determinism(True), triton_interpreter():
        attended = FlashAttention3().forward(operands, case.rules)
        actual = FlashAttention3().backward(grad, attended, operands, case.rules)
    exact = ReferenceBackend().forward(operands, case.rules)
    expected = ReferenceBackend().backward(grad, exact, operands, case.rules)
    for found, truth in zip(actual[:4], expected[:4]):
        assert relative_error(found, truth) < 1e-4


CASE = KernelCase("absorbed", "flash_attention_3", INTERPRETED, torch.float32, "sbhd", False)


class TestLayer:
    """Forward by the operator, backward by the portable kernels in the interpreter."""

    @pytest.fixture(autouse=True)
    def _runs(self, calls, monkeypatch):
        found = FlashAttention3()
        found._gradients = LatentKernelBackend("triton")
        monkeypatch.setitem(_BACKENDS, found.name, (found, lambda request: None))
        with kernels_running(CASE):
            yield
        assert calls.sequences

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layer(self, layout):
        check(execute(CASE.mla, CASE.setup(), grid_layout(layout, divisible=False)), CASE.dtype)

    @pytest.mark.parametrize("tokens", [dense(13, 2), packed((5, 1, 0, 7), (6, 3, 2, 9))])
    def test_blocks_of_keys(self, tokens, monkeypatch):
        """Context parallelism: blocks are merged by the LSE that the operator gives."""
        monkeypatch.setattr(strategy, "LocalKeys", Blocks)
        check(execute(CASE.mla, CASE.setup(), tokens), CASE.dtype)


REQUEST = AttentionRequest(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    key_width=576,
    value_width=512,
    latent=True,
    masked=False,
    dropout=False,
)


class TestRefusals:
    """Whatever is wrong is a reason: "auto" has other backends to take."""

    @pytest.fixture(autouse=True)
    def _hopper(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr("triton.__version__", "3.6.0")
        monkeypatch.setattr(backend, "_NAMESPACES", (NAMESPACE,))

    def reason(self, **change) -> str | None:
        found = examine("flash_attention_3", replace(REQUEST, **change))
        return found[1].get("flash_attention_3")

    @pytest.mark.parametrize("key_width", [320, 576])
    def test_none(self, calls, key_width):
        assert self.reason(key_width=key_width, value_width=key_width - 64) is None

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"device": CPU}, "needs a GPU"),
            ({"dtype": torch.float32}, "fp16 and bf16"),
            ({"latent": False, "key_width": 192, "value_width": 128}, "form='absorbed'"),
            ({"masked": True}, "attention_mask"),
            ({"dropout": True}, "attention_dropout=0"),
            ({"key_width": 192, "value_width": 128}, "widths 128 (latent) and 64 (rope)"),
            ({"key_width": 544}, "32 (rope) are not among (256, 512) and 64"),
        ],
    )
    def test_request(self, calls, change, reason):
        assert reason in self.reason(**change)

    @pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
    def test_another_gpu(self, calls, capability, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert "compute capability 9.0" in self.reason()

    def test_no_backward(self, calls, monkeypatch):
        """Nothing of FlashAttention-3 needs Triton, but its gradients here do."""
        monkeypatch.setattr("triton.__version__", "3.8.0")
        reason = self.reason()
        assert "3.8.0 is installed" in reason and "'hopper', which computes its backward" in reason

    @pytest.fixture()
    def no_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn_3", ModuleType("flash_attn_3"))

    @pytest.mark.parametrize("error", [ModuleNotFoundError("flash_attn_3._C"), OSError("libcuda")])
    def test_not_installed(self, error, monkeypatch):
        def fails(name):
            raise error

        monkeypatch.setattr(backend.importlib, "import_module", fails)
        assert f"cannot be imported ({type(error).__name__}: {error})" in backend.operator_refusal()

    def test_another_package_of_that_name(self, no_package, monkeypatch):
        monkeypatch.delitem(sys.modules, "flash_attn_3._C", raising=False)
        assert "flash_attn_3._C" in backend.operator_refusal()

    def test_an_older_operator(self):
        with registered(PACKAGE.replace("Tensor? q_v=None, ", "")):
            assert self.reason() == f"{NAMESPACE}.fwd.default has no q_v"

    def test_a_newer_operator(self):
        with registered(VLLM.replace("int cp_rank", "int cp_rank, int order")):
            assert self.reason() == f"{NAMESPACE}.fwd.default needs order"

    def test_nothing_is_imported_where_an_operator_is_loaded(self, calls, monkeypatch):
        monkeypatch.setitem(sys.modules, "flash_attn_3", None)
        assert self.reason() is None


def _why_not_on_this_machine() -> str | None:
    if not needs.HAS_GPU:
        return needs.NEEDS_GPU
    return backend.flash_attention_3_refuses(replace(REQUEST, device=torch.device("cuda")))


@needs.gpu_with("FlashAttention-3", _why_not_on_this_machine())
class TestOnAGPU:
    @pytest.mark.parametrize(
        ("content", "dtype"), [(512, torch.bfloat16), (512, torch.float16), (256, torch.bfloat16)]
    )
    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize("name", SPANS)
    def test_no_worse_than_pytorch(self, name, batch, content, dtype):
        """At most twice the error of a plain evaluation in the same precision."""
        case = replace(case_of(name, batch, dtype), content=content, heads=16)
        device = torch.device("cuda")
        operands, grad = case.operands(device), case.gradient(device)
        attended = FlashAttention3().forward(operands, case.rules)
        found = named(attended, FlashAttention3().backward(grad, attended, operands, case.rules))
        exact = evaluate(case, operands, grad, torch.float64)
        eager = evaluate(case, operands, grad, dtype)
        for key, truth in exact.items():
            seen = torch.isfinite(truth)
            assert torch.equal(torch.isfinite(found[key]), seen), key
            error, plain = (self.error(x[key][seen], truth[seen]) for x in (found, eager))
            assert error <= 2 * plain + torch.finfo(dtype).eps / 4, key

    @staticmethod
    def error(actual: Tensor, expected: Tensor) -> float:
        return relative_error(actual, expected) if expected.numel() else 0.0
