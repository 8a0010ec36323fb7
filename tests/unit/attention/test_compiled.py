"""torch.compile around the layer, and CUDA graphs of a whole step of it."""

from dataclasses import replace

import pytest
import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.support import needs, world
from tests.support.cases import TINY, VARIANTS
from tests.support.combinations import thinned
from tests.support.harness import Setup, build_attention

V3_HEADS = replace(TINY, heads=4, kv_lora_rank=128, nope=128, rope=64, v=128)
FORMS = ("absorbed", "expanded")


@pytest.fixture(autouse=True)
def _dynamo(monkeypatch):
    # Off elsewhere: nothing but this is meant to be compiled.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        yield


def step(layer, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of the input and of every parameter."""
    leaves = [x, *layer.parameters()]
    output, _ = layer(x, None)
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


@pytest.mark.parametrize(
    "form, mla", [("expanded", VARIANTS["all_variants"])] + [("absorbed", TINY)] * (not thinned())
)
def test_compiled_layer(form, mla):
    """What the compiler cannot follow it leaves alone; nothing changes but rounding."""
    layer = build_attention(mla, Setup(form=form, dtype=torch.float32))
    x = torch.randn(12, 2, TINY.hidden, device=world.device(), requires_grad=True)
    graphs: list[object] = []
    compiled = torch.compile(layer, backend=lambda module, _: graphs.append(module) or module)
    for actual, expected in zip(step(compiled, x), step(layer, x)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert graphs


@needs.no_gpu
def test_megatrons_functions_are_not_compiled():
    """On a CPU, whose programs need not import PyTorch's compiler: half of what Megatron takes."""
    assert not hasattr(quick_gelu, "_torchdynamo_orig_callable")
    assert hasattr(torch.compile(lambda x: x), "_torchdynamo_orig_callable")


@needs.gpu
@pytest.mark.parametrize("form", FORMS)
def test_captured_step(form):
    """Replayed on other input, a graph gives what the layer gives."""
    setup = Setup(form=form, dtype=torch.bfloat16, expansion_chunk_size=2**20)
    layer = build_attention(V3_HEADS, setup)
    inputs = [
        torch.randn(256, 1, TINY.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    ]
    x = inputs[0].clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(layer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x)
    with torch.no_grad():
        x.copy_(inputs[1])
    graph.replay()
    torch.cuda.synchronize()
    for actual, expected in zip(captured, step(layer, x)):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
