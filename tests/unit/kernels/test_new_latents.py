"""The one launch that makes the latents of new tokens, beside the kernels that it replaces."""

import pytest
import torch

from absorbed_mla import attention as attention_module
from absorbed_mla import norm as norm_module
from tests.support import world
from tests.support.backends import triton_interpreter
from tests.support.cases import TINY
from tests.support.combinations import grid
from tests.support.harness import Setup, build_attention
from tests.support.inference import infer_in_steps
from tests.support.layouts import dense
from tests.support.numerics import random
from tests.unit.inference.test_dynamic_context import Host

pytest.importorskip("triton")
# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_forward
    from absorbed_mla.kernels.paged import new_latents as module
    from absorbed_mla.kernels.rotation import rotate

pytestmark = pytest.mark.usefixtures("interpreted")
# Of so many, some are rounded another way if a product is added unrounded.
ROWS = [1, 3, 2000] if torch.cuda.is_available() else [1, 3, 33]


WIDTHS = [(48, 20, 8), (96, 64, 64), (7, 128, 2)]
DTYPES = [torch.float32, torch.bfloat16]


@grid(1, {"count": ROWS, "dtype": DTYPES, "widths": WIDTHS, "zero_centered": [False, True]})
def test_is_norm_and_rotation(count, dtype, widths, zero_centered):
    """To the bit; of views, and of fewer queries than keys, and only the first keys are cached."""
    width, rank, rope = widths
    down = random(count, width + rank + rope, dtype=dtype)
    q_down, kv_down = down.split((width, rank + rope), dim=-1)
    q_down = q_down[: max(1, count - 2)]
    weights = random(width, dtype=dtype), random(rank, dtype=dtype)
    angles = random(count, rope // 2)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()
    query, _ = rms_norm_forward(q_down, weights[0], 1e-6, zero_centered, dtype)
    latent, _ = rms_norm_forward(kv_down[:, :rank], weights[1], 1e-5, zero_centered, dtype)
    keys = torch.cat((latent, kv_down[:, rank:]), dim=-1)
    # The interpreter cuts what a kernel stores to bf16 unless it is told to round.
    exact = keys.float()
    rotate(exact.view(count, 1, 1, -1), cos, sin, False)
    keys = exact.to(dtype)
    places = max(1, count - 1)
    blocks = torch.randperm(2040, device=world.device())[:places]
    offsets = random(places).abs().long() % 4
    cache = random(2041, 4, rank + rope + 3, dtype=dtype)[..., 1:-2]
    expected = cache.clone()
    expected[blocks, offsets] = keys[:places]
    # The interpreter has no fused multiply-add, and NumPy may or may not round between.
    near = {"rtol": 2**-8 if dtype.itemsize == 2 else 1e-6, "atol": 1e-6}
    if cache.is_cuda:
        near = {"rtol": 0, "atol": 0}
    for slots in (None, (cache, blocks.int(), offsets)):
        found = module.new_latents(
            module.Normed(q_down, weights[0], 1e-6),
            module.Normed(kv_down, weights[1], 1e-5),
            *(cos, sin, zero_centered, slots),
        )
        assert [x.dtype for x in found] == [dtype, dtype]
        assert torch.equal(found[0], query)
        torch.testing.assert_close(found[1], keys, **near)
    torch.testing.assert_close(cache, expected, **near)
    assert torch.equal(cache[2040], expected[2040])


@pytest.fixture
def at_once(monkeypatch):
    """Layers take the kernel, as on a GPU; the list of its calls."""
    calls, whole = [], module.new_latents
    monkeypatch.setattr(attention_module, "has_few_rows", lambda x: not torch.is_grad_enabled())

    def counted(*args):
        calls.append(args[-1])
        return whole(*args)

    monkeypatch.setattr(module, "new_latents", counted)
    return calls


def layer(**setup):
    torch.manual_seed(0)
    made = Setup(dtype=torch.float32, **setup)
    return build_attention(TINY, made, cache_mla_latents=True).eval()


def outputs(attention) -> list[torch.Tensor]:
    """Of a prompt and two decode steps over a dynamic context, beside a request of one token."""
    torch.manual_seed(1)
    host, found = Host(attention), []
    host.add(0, 37)
    host.add(1, 1)
    for _ in range(3):
        found += host.forward().values()
        host.end_step()
    return found


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("cache", ["model", "fp8"])
def test_in_a_layer(request, form, cache):
    """A dynamic context's latents, which FP8 rows are made of where the cache holds those."""
    attention = layer(form=form, latent_cache_dtype=cache)
    expected = outputs(attention)
    calls = request.getfixturevalue("at_once")
    found = outputs(attention)
    assert len(calls) == 3 and all((slots is None) == (cache == "fp8") for slots in calls)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_in_a_static_context(request):
    """Requests of a batch lie one after the other, and the cache writes them itself."""
    setup = Setup(dtype=torch.float32)
    attention, x = layer(), dense(7, 2).random_rows(TINY.hidden, 1).float()
    expected = infer_in_steps(attention, setup, x, (5, 1, 1))
    calls = request.getfixturevalue("at_once")
    found = infer_in_steps(attention, setup, x, (5, 1, 1))
    assert calls == [None] * 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@grid(
    1, {"kind": ["hook", "pre-hook", "forward", "class"], "norm": ["q_layernorm", "kv_layernorm"]}
)
def test_norms_that_are_more(at_once, norm, kind):
    """Somebody waits for their call."""
    attention, seen = layer(), []
    outputs(attention)
    assert len(at_once) == 3
    module = getattr(attention, norm)
    if kind == "hook":
        module.register_forward_hook(lambda *_: seen.append(1))
    elif kind == "pre-hook":
        module.register_forward_pre_hook(lambda *_: seen.append(1))
    elif kind == "forward":
        module.forward = lambda x: seen.append(1) or norm_module.RMSNorm.forward(module, x)
    else:
        module.__class__ = type("Other", (norm_module.RMSNorm,), {})
    outputs(attention)
    assert len(at_once) == 3
    assert len(seen) == (0 if kind == "class" else 3)


def test_with_gradients(at_once):
    """Nothing but generation takes it."""
    attention = layer()
    x = dense(7, 2).random_rows(TINY.hidden, 1).float().to(world.device()).requires_grad_()
    attention(x, None)[0].sum().backward()
    assert x.grad.isfinite().all() and not at_once
