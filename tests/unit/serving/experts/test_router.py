"""The router's kernels on few tokens of a GPU, here by Triton's interpreter."""

import pytest
import torch
from megatron.core.transformer.moe import router as megatron_router

from absorbed_mla.serving.experts import router as router_module
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.experts import ROUTED, pair

pytestmark = [needs.no_gpu, pytest.mark.usefixtures("interpreted")]
pytest.importorskip("triton")
# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.moe import logits


@pytest.mark.parametrize("changed", [None, "many", "replay", "bf16", "biased", "gradients"])
def test_logits_in_parts(monkeypatch, changed):
    """Where nothing but the choice looks at the logits, which are to be in fp32."""
    calls, whole = [], logits.partial_logits
    monkeypatch.setattr(logits, "partial_logits", lambda *args: calls.append(1) or whole(*args))
    _, grouped = pair(**ROUTED)
    router = grouped.decoder.layers[1].mlp.router
    if changed == "replay":
        router.router_replay = object()
        monkeypatch.setattr(router, "routing", lambda logits, padding_mask: (logits, None))
    elif changed == "bf16":
        router.config.moe_router_dtype = None
    elif changed == "biased":
        router.config.moe_router_force_biased = 0.5
        monkeypatch.setattr(megatron_router, "apply_biased_logits", lambda logits, *_: 2 * logits)
    elif changed == "many":
        monkeypatch.setattr(logits, "_MOST_TOKENS", 119)
    x = torch.randn(40, 3, grouped.config.hidden_size)
    with torch.no_grad():
        expected = router(x)
    monkeypatch.setattr(router_module, "_generates", lambda x: not torch.is_grad_enabled())
    with torch.set_grad_enabled(changed == "gradients"):
        found = router(x)
    assert len(calls) == (changed is None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
