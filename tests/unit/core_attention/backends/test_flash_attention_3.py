"""FlashAttention-3's forward over the latent, with this package's backward.

Without a GPU, operators with the signatures of the package and of vLLM's build compute in float64;
on a GPU with either of them it runs itself as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.backends import flash_attention_3 as backend
from absorbed_mla.core_attention.backends.flash_attention_3 import FlashAttention3Backend
from absorbed_mla.core_attention.backends.reference import ReferenceBackend
from absorbed_mla.core_attention.backends.triton import ENTRY as TRITON
from absorbed_mla.core_attention.masks.varlen import varlen_calls
from absorbed_mla.kernels import operators
from tests.support import needs
from tests.support.backends import attention_request, determinism, triton_interpreter
from tests.support.fake_packages.flash_attention_3 import NAMESPACE, PACKAGE, VLLM, registered
from tests.support.hostile import Case, evaluate, named, poisoned_memory
from tests.support.numerics import relative_error
from tests.support.spans import SPANS

# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.triton.backward
    import absorbed_mla.kernels.triton.forward  # noqa: F401

CPU = torch.device("cpu")


def case_of(name: str, batch: int = 1, dtype: torch.dtype = torch.float32) -> Case:
    return Case(24, 32, SPANS[name], heads=3, batch=batch, content=256, rope=64, dtype=dtype)


@pytest.fixture(params=[PACKAGE, VLLM], ids=["package", "vllm"])
def calls(request, monkeypatch):
    monkeypatch.setattr(backend, "_NAMESPACES", (NAMESPACE,))
    with registered(request.param) as found:
        yield found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SPANS)
def test_forward(name, batch, calls):
    """What nobody writes is NaN: output, and the LSE between sequences."""
    case = case_of(name, batch)
    operands = case.operands(CPU)
    with poisoned_memory():
        actual = FlashAttention3Backend().forward(operands, case.rules)
    exact = ReferenceBackend().forward(operands, case.rules)
    unseen = exact.lse == -torch.inf
    assert torch.equal(actual.lse == -torch.inf, unseen) and (actual.out[unseen] == 0).all()
    assert relative_error(actual.out, exact.out) < 1e-5
    assert relative_error(*(x.lse[~unseen] for x in (actual, exact))) < 1e-6
    # A pack is one call.
    assert len(calls.sequences) == batch * len(varlen_calls(case.spans, batch == 1))


@pytest.mark.parametrize("demanded", [False, True])
def test_whose_backward(demanded, calls, monkeypatch):
    """The one that stores, with a table of parts, is deterministic."""
    case, asked = case_of("pack"), []
    operands, grad = case.operands(CPU), case.gradient(CPU)

    def recorded(*given):
        *_, parts, _, _, kernel = given
        asked.append((kernel, parts is not None))
        return operands.q_content, operands.q_rope, torch.zeros(32, 1, 320)

    monkeypatch.setattr(operators, "latent_attention_backward", recorded)
    attended = FlashAttention3Backend().forward(operands, case.rules)
    with determinism(demanded), triton_interpreter():
        FlashAttention3Backend().backward(grad, attended, operands, case.rules)
    assert asked == [("hopper", demanded)]


@needs.no_gpu
@pytest.mark.parametrize("name", ["padding", "zigzag"])
def test_gradients(name, monkeypatch):
    """Of all operands, from the output and LSE that the operator gave."""
    monkeypatch.setattr(backend, "_NAMESPACES", (NAMESPACE,))
    monkeypatch.setattr(backend, "HOPPER", TRITON)  # which runs on a CPU
    case = case_of(name)
    operands, grad = case.operands(CPU), case.gradient(CPU)
    with registered(), determinism(True), triton_interpreter():
        attended = FlashAttention3Backend().forward(operands, case.rules)
        actual = FlashAttention3Backend().backward(grad, attended, operands, case.rules)
    exact = ReferenceBackend().forward(operands, case.rules)
    expected = ReferenceBackend().backward(grad, exact, operands, case.rules)
    for found, truth in zip(actual[:4], expected[:4]):
        assert relative_error(found, truth) < 1e-4


def _why_not_on_this_machine() -> str | None:
    if not needs.HAS_GPU:
        return needs.NEEDS_GPU
    return backend.ENTRY.why_not(attention_request("absorbed"))


@needs.gpu_with("FlashAttention-3", _why_not_on_this_machine())
@pytest.mark.parametrize(
    ("content", "dtype"), [(512, torch.bfloat16), (512, torch.float16), (256, torch.bfloat16)]
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SPANS)
def test_on_a_gpu(name, batch, content, dtype):
    """At most twice the error of a plain evaluation in the same precision."""
    case = replace(case_of(name, batch, dtype), content=content, heads=16)
    device = torch.device("cuda")
    operands, grad = case.operands(device), case.gradient(device)
    attended = FlashAttention3Backend().forward(operands, case.rules)
    found = named(attended, FlashAttention3Backend().backward(grad, attended, operands, case.rules))
    exact = evaluate(case, operands, grad, torch.float64)
    eager = evaluate(case, operands, grad, dtype)
    for key, truth in exact.items():
        seen = torch.isfinite(truth)
        assert torch.equal(torch.isfinite(found[key]), seen), key
        error, plain = (error_of(x[key][seen], truth[seen]) for x in (found, eager))
        assert error <= 2 * plain + torch.finfo(dtype).eps / 4, key


def error_of(actual: Tensor, expected: Tensor) -> float:
    return relative_error(actual, expected) if expected.numel() else 0.0
