"""The kernels that move or merge, beside their twins in PyTorch; interpreted on a CPU."""

import importlib

import pytest
import torch

from absorbed_mla.core_attention import merge as merge_module
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.types import AttentionInputs
from tests.support import world
from tests.support.backends import interpret_kernel
from tests.support.cases import TINY, random_weights
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.inference import infer_in_steps
from tests.support.layouts import dense

pytest.importorskip("triton")


@pytest.fixture
def kernels(monkeypatch):
    """``kernels(module, name)`` is the module, its kernel interpreted where there is no GPU."""

    def load(module: str, name: str):
        found = importlib.import_module(f"absorbed_mla.kernels.{module}")
        interpret_kernel(monkeypatch, found, name)
        return found

    return load


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize(("heads", "width", "rope"), [(1, 24, 8), (5, 30, 6), (16, 192, 64)])
def test_broadcast_k_rope(kernels, tokens, heads, width, rope):
    """Every head gets k_rope, the other channels stay, whatever lies beside k_rope."""
    device = world.device()
    kv = torch.randn(tokens, rope + 3, device=device)
    keys = torch.randn(tokens, heads, width, device=device)
    expected = keys.clone()
    expected[..., width - rope :] = kv[:, None, 3:]
    kernels("broadcast_k_rope", "_broadcast_kernel").broadcast_k_rope(kv[:, 3:], keys)
    assert torch.equal(keys, expected)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 200), (13, 141), (64, 128), (5, 5)])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(("block_size", "width"), [(64, 80), (7, 576), (200, 5)])
def test_gather(kernels, start, end, token_major, block_size, width):
    """Keys in scattered blocks, in any order of the cache's axes; nothing else is read."""
    device, needed = world.device(), -(-200 // block_size)
    cache = torch.full((needed + 3, block_size, width), torch.nan, device=device)
    blocks = torch.randperm(needed + 3, device=device)[:needed]
    keys = torch.randn(needed * block_size, width, device=device)
    cache[blocks] = keys.view(needed, block_size, width)
    if token_major:
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    table = torch.full((needed + 1, 2), 10**6, dtype=torch.int32, device=device)
    table[:needed, 1] = blocks
    out = torch.full((end - start, width + 2), torch.nan, device=device)
    kernels("paged.gather", "_gather_kernel").gather(cache, table[:, 1], start, end, out[:, 1:-1])
    assert torch.equal(out[:, 1:-1], keys[start:end])
    assert out[:, [0, -1]].isnan().all()


def parts(dtype: torch.dtype, heads_first: bool):
    """Two parts [3, 2, 5, 12] with their LSE; some rows see nothing, or next to nothing."""
    device, shape = world.device(), (3, 2, 5)
    out, part = (torch.randn(*shape, 12, device=device) for _ in range(2))
    lse, part_lse = (10 * torch.randn(shape, device=device) for _ in range(2))
    lse[0, 0] = part_lse[0, :, 1] = -torch.inf
    lse[1, 0, 0], part_lse[1, 0, 1], lse[1, 1, 2] = 1e30, 3e4, -3e38
    out[lse == -torch.inf], part[part_lse == -torch.inf] = 0, 0
    if heads_first:
        lse, part_lse = (x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (lse, part_lse))
        part = part.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    return out, lse, part.to(dtype), part_lse


@pytest.mark.parametrize("batch", [slice(None), 1], ids=["batch", "one_axis_of_tokens"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(kernels, dtype, heads_first, batch):
    """As in float64, -inf and NaN-free; in any memory layout."""
    out, lse, part, part_lse = (x[:, batch] for x in parts(dtype, heads_first))
    found = kernels("merging", "_merge_kernel").merge(out, lse, part, part_lse)
    expected = merge(*(x.double() for x in (out, lse, part, part_lse)))
    assert found[0].dtype == found[1].dtype == torch.float32
    for actual, truth in zip(found, expected):
        assert actual.shape == truth.shape
        torch.testing.assert_close(actual.double(), truth, rtol=2e-6, atol=2e-6)
    assert (found[1] == -torch.inf).equal((lse == -torch.inf) & (part_lse == -torch.inf))


def test_merge_into_rows(kernels):
    """Both parts in bf16, into rows of tensors in another memory layout, rounded once."""
    out, lse, part, part_lse = parts(torch.bfloat16, heads_first=True)
    out = out.bfloat16()
    wide = torch.full((4, 2, 7, 12), 9.0, dtype=torch.bfloat16, device=out.device)
    total = torch.full((5, 2, 4), 9.0, device=out.device).permute(2, 1, 0)
    rows = wide[1:, :, 1:6], total[1:]
    kernels("merging", "_merge_kernel").merge_into(*rows, out, lse, part, part_lse)
    merged, expected = merge(*(x.double() for x in (out, lse, part, part_lse)))
    torch.testing.assert_close(rows[0], merged.bfloat16(), rtol=8e-3, atol=2e-6)
    torch.testing.assert_close(rows[1].double(), expected, rtol=2e-6, atol=2e-6)
    for untouched in (wide[:1], wide[:, :, 0], wide[:, :, 6:], total[:1]):
        assert (untouched == 9).all()


def test_merge_of_nothing(kernels):
    """No token, or no head."""
    module = kernels("merging", "_merge_kernel")
    for shape in ((0, 1, 2), (3, 1, 0)):
        rows = torch.zeros(*shape, 4, device=world.device())
        lse = torch.zeros(shape, device=world.device())
        merged, total = module.merge(rows, lse, rows, lse)
        assert merged.shape == rows.shape
        assert total.shape == lse.shape


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_merge_in_the_layer(kernels, monkeypatch, form):
    """The kernel takes what both forms hand over: a cache in parts is the cache in one."""
    calls = []
    module = kernels("merging", "_merge_kernel")
    monkeypatch.setattr(merge_module, "_by_kernel", lambda *tensors: calls.append(tensors) or True)
    monkeypatch.setattr(module, "_NUMBERS", 32)
    x = dense(7, 2).random_rows(TINY.hidden, 1).float()
    outputs = []
    for resident in (None, 3):
        setup = Setup(form=form, dtype=torch.float32, latent_cache_tokens=resident)
        attention = build_attention(TINY, setup).eval()
        load_weights(attention, TINY, setup, random_weights(TINY))
        outputs.append(infer_in_steps(attention, setup, x, (5, 1, 1)))
    assert calls
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


class HeadsFirst(PlainCudnn):
    """Gives bf16 and fp32 in the memory layout of cuDNN's."""

    def dense_forward(self, *call):
        out, lse = super().dense_forward(*call)
        out = out.bfloat16().permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
        return out, lse.float().permute(1, 2, 0).contiguous().permute(2, 0, 1)


def test_merge_of_blocks(kernels, monkeypatch):
    """Queries over earlier keys and each other: a rectangle and a causal square of slices."""
    device = world.device()
    q, k, v = (torch.randn(n, 2, 3, 8, device=device) for n in (5, 9, 9))
    operands = AttentionInputs.multi_head(q, k, v)
    rules = ScoreRules(0.3, (Span(1, 5, 0, 9, causal_offset=5),))
    backend = HeadsFirst()
    monkeypatch.setattr(merge_module, "_by_kernel", lambda *tensors: False)
    expected = backend.forward(operands, rules)
    calls = []
    kernels("merging", "_merge_kernel")
    monkeypatch.setattr(merge_module, "_by_kernel", lambda *tensors: calls.append(tensors) or True)
    found = backend.forward(operands, rules)
    assert calls
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
