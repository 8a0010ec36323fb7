"""What only a GPU shows of the kernels over the latent: long offsets, streams, graphs, compilation.

Their results are tested in ``test_latent_kernels.py``; here two ways to the same one are compared.
"""

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from tests.support import needs
from tests.support.backends import determinism
from tests.support.gpu_calls import capture, on_streams
from tests.support.hostile import Case, named
from tests.unit.kernels.test_latent_kernels import DEVICE, backend_for, compute

pytestmark = [needs.gpu, pytest.mark.parametrize("kernel", ["triton", "hopper"])]

CASE = Case(500, 500, (Span(0, 500, 0, 500, 0),), content=512, rope=64, lse_gradient=False)
# Hopper's backward adds in any order, in fp32.
ORDER = {"triton": 0.0, "hopper": 2e-4}


@pytest.fixture(autouse=True)
def _settings():
    """Without the suite's deterministic mode, in which 'hopper' does not add with atomics."""
    with determinism(demanded=False):
        yield


def inputs(seed: int = 0) -> tuple[AttentionInputs, OutputGradient]:
    operands, grad = CASE.operands(DEVICE), CASE.gradient(DEVICE)
    if seed:
        operands = AttentionInputs(*(x.roll(seed, 0) for x in operands[:4]), None)
    return operands, grad


def assert_same(actual: dict, expected: dict, tolerance: float) -> None:
    for name, tensor in expected.items():
        if tolerance and name.startswith("d"):
            scale = float(tensor.abs().max())
            difference = float((actual[name] - tensor).abs().max())
            bound = tolerance if tensor.dtype == torch.float32 else 2**-7
            assert difference <= bound * scale, f"{name}: {difference:.2e} of {scale:.2e}"
        else:
            assert torch.equal(actual[name], tensor), name


def test_half_a_million_tokens(kernel):
    """Elements from 2**31 on; the last 500 tokens are a sequence, the others belong to none."""
    backend, length = backend_for(kernel, CASE), 2**19 + 512
    operands, grad = inputs()
    expected = compute(backend, CASE, operands, grad)

    def at_the_end(x: torch.Tensor) -> torch.Tensor:
        buffer = x.new_empty(length, *x.shape[1:])
        buffer[-len(x) :] = x
        return buffer

    long = AttentionInputs(*(at_the_end(x) for x in operands[:4]), None)
    assert long.q_content.numel() > 2**32
    start = length - CASE.queries
    case = Case(length, length, (Span(start, length, start, length, 0),), content=512, rope=64)
    attended = backend.forward(long, case.rules)
    long_grad = OutputGradient(at_the_end(grad.out), None)
    actual = named(attended, backend.backward(long_grad, attended, long, case.rules))
    assert not actual["out"][:start].any() and not actual["dlatent"][:start].any()
    assert not actual["dq_content"][:start].any()
    # The more tiles of keys, the fewer parts their sums have (3.6e-5 seen).
    assert_same({n: x[start:] for n, x in actual.items()}, expected, 2e-4)


def test_streams(kernel):
    """Calls side by side, with tables that another stream has made."""
    backend = backend_for(kernel, CASE)
    calls = [(backend, CASE, *inputs(seed)) for seed in range(4)]
    expected = [compute(*call) for call in calls]
    for one, other in zip(on_streams(compute, calls), expected):
        assert_same(one, other, ORDER[kernel])


def test_cuda_graph(kernel):
    """Recorded once, replayed on other values."""
    backend = backend_for(kernel, CASE)
    operands, grad = inputs()
    graph, recorded = capture(lambda: compute(backend, CASE, operands, grad))
    for seed in (1, 2):
        others, _ = inputs(seed)
        for x, other in zip(operands[:4], others[:4]):
            x.copy_(other)
        graph.replay()
        expected = compute(backend, CASE, others, grad)
        assert_same(recorded, expected, ORDER[kernel])


@pytest.mark.filterwarnings("ignore")
def test_torch_compile(kernel):
    """The operators stay whole in a graph without breaks."""
    backend = backend_for(kernel, CASE)
    operands, grad = inputs()
    expected = compute(backend, CASE, operands, grad)
    table = backend._query_tiles(operands, CASE.spans)
    keys, num_buffers = backend.key_tiles(operands, CASE.spans)
    scale, latent = CASE.rules.scale, operands.k_content.squeeze(2)
    ops = torch.ops.absorbed_mla

    def step(q_content, q_rope, latent, k_rope, grad_out):
        tensors = (q_content * 2, q_rope * 2, latent, k_rope)
        out, lse, _ = ops.latent_attention_forward(*tensors, table, scale / 2, kernel)
        grads = ops.latent_attention_backward(
            grad_out, None, out, lse, *tensors, table, keys, num_buffers, scale / 2, kernel
        )
        return out, lse, grads[0] * 2, grads[1] * 2, grads[2]

    compiled = torch.compile(step, fullgraph=True)
    out, lse, dqc, dqr, dkv = compiled(*operands[:2], latent, operands.k_rope, grad.out)
    found = AttentionInputs(dqc, dqr, dkv[..., None, :512], dkv[..., 512:], None)
    assert_same({"out": out, "lse": lse}, {n: expected[n] for n in ("out", "lse")}, 0.0)
    for name, tensor in named(AttentionOutput(out, lse), found).items():
        size = float(expected[name].abs().max())
        assert float((tensor - expected[name]).abs().max()) <= 2e-2 * size, name
