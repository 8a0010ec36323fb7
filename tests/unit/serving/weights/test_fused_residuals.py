"""Residual connections that make what the norm behind them returns, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from absorbed_mla.caching import full_cuda_graph
from absorbed_mla.serving.weights import fused_residuals
from absorbed_mla.serving.weights.fused_residuals import NormedSum, fuse_residuals
from tests.support import needs, world
from tests.support.backends import triton_interpreter
from tests.support.models import MIXED, gpt_model, logits

pytestmark = pytest.mark.usefixtures("interpreted")
pytest.importorskip("triton")
# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels import added_norm as module
    from absorbed_mla.kernels.invariant.rms_norm import rms_norm_forward


@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize("width", [48, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_kernel(rows, width, dtype, zero_centered):
    """To the bit an addition, then a norm of what was rounded."""
    generator = torch.Generator().manual_seed(rows)
    x, residual, weight = (
        torch.randn(*shape, generator=generator).to(world.device(), dtype)
        for shape in ((rows, 1, width), (rows, 1, width), (width,))
    )
    expected, _ = rms_norm_forward((x + residual)[:, 0], weight, 1e-6, zero_centered, dtype)
    total, normed = module.added_norm(x, residual, weight, 1e-6, zero_centered)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed[:, 0], expected)


@pytest.fixture
def calls(monkeypatch):
    """Of the kernel, which takes tensors of a CPU."""
    monkeypatch.setattr(fused_residuals, "few_rows", lambda x: True)
    made, whole = [], module.added_norm
    monkeypatch.setattr(module, "added_norm", lambda *args: made.append(1) or whole(*args))
    return made


def model(**fields):
    return gpt_model(**{**MIXED, "activation_func": F.silu, **fields}).eval()


@needs.no_gpu
class TestModel:
    def test_same_logits(self, calls):
        """Two connections of each layer; the last one's norm is the model's."""
        made = model()
        expected = logits(made)
        fuse_residuals(made)
        with full_cuda_graph():
            found = logits(made)
        assert len(calls) == 2 * len(made.decoder.layers)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # Nothing is left that another run could take.
        for layer in made.decoder.layers:
            assert layer.self_attn_bda._made is None and layer.mlp_bda._made is None

    def test_the_norm_takes_it(self, calls, monkeypatch):
        made = model()
        before = logits(made)
        fuse_residuals(made)
        whole = module.added_norm
        monkeypatch.setattr(module, "added_norm", lambda *args: (whole(*args)[0], 0 * args[0]))
        with full_cuda_graph():
            assert not torch.allclose(logits(made), before)

    def test_other_steps(self, calls):
        """Not outside of a whole step, nor in training."""
        made = model()
        expected = logits(made)
        fuse_residuals(made)
        assert torch.equal(logits(made), expected)
        with full_cuda_graph():
            made.train()
            tokens = torch.zeros(1, 4, dtype=torch.long)
            made(tokens, torch.arange(4)[None], None).sum().backward()
        assert not calls

    def test_another_tensor(self, calls):
        """A norm of anything but the sum computes it, as it does in the next run."""
        made = model()
        layer = made.decoder.layers[0]
        norm = layer.pre_mlp_layernorm
        fuse_residuals(made)
        x, y = torch.randn(2, 3, 1, made.config.hidden_size)
        with torch.no_grad(), full_cuda_graph():
            expected, other = norm(2 * x), norm(y)
            total = layer.self_attn_bda(False, False)((x, None), x, 0.0)
            assert torch.equal(norm(y), other) and len(calls) == 1
            # That was not for it, and is nobody's any more.
            torch.testing.assert_close(norm(total), expected)
            total = layer.self_attn_bda(False, False)((x, None), x, 0.0)
        layer.self_attn_bda._made = total, y
        with torch.no_grad(), full_cuda_graph():
            torch.testing.assert_close(norm(total), expected)

    def test_other_layers_stay(self):
        """With norms of another kind, or hooks that wait for their call."""
        made = model()
        first = made.decoder.layers[0]
        first.pre_mlp_layernorm.register_forward_hook(lambda *_: None)
        made.decoder.final_layernorm = None
        fuse_residuals(made)
        last = made.decoder.layers[-1]
        assert not isinstance(first.self_attn_bda, NormedSum)
        assert not isinstance(last.mlp_bda, NormedSum)
        assert isinstance(first.mlp_bda, NormedSum)
