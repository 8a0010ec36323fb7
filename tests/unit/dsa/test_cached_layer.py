"""The sparse layer over cached keys gives every token what the forward of the whole text gives it.

In float64, with more tokens than top-k. If these fail, generation attends to other keys than
training.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from absorbed_mla.dsa import core_attention
from absorbed_mla.dsa.replay import record_selections, replay_selections
from absorbed_mla.inference.index_keys import allocate_index_keys
from tests.support import world
from tests.support.dsa import TINY_DSA, VARIANTS, random_weights
from tests.support.dsa_layer import build
from tests.support.harness import Setup
from tests.support.inference import infer_in_steps
from tests.support.refusal import refusal
from tests.unit.inference.test_dynamic_context import GRAPHS, Captured, Host, _initialized
from tests.unit.inference.test_fp8_cache import FP8, WIDER

SETUP = Setup(form="auto")
# Of three heads of an indexer many scores are 0: keys tie.
DSA = replace(TINY_DSA, topk=5)


FP8_SETUP = replace(SETUP, **FP8)


def layer_of(dsa=DSA, setup=SETUP, **changes):
    return build(dsa, setup, random_weights(dsa), cache_mla_latents=True, **changes).eval()


@pytest.fixture(scope="module")
def layer():
    return layer_of()


@pytest.fixture(scope="module")
def fp8_layer():
    """Forwards without a cache see latents as the cache returns them."""
    return layer_of(setup=FP8_SETUP)


def random_rows(tokens: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (tokens, batch, DSA.hidden)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(world.device())


class TestStatic:
    @pytest.mark.parametrize("variant", [*VARIANTS])
    def test_variants(self, variant):
        self.check(layer_of(VARIANTS[variant]), [7, 3, 1, 1, 1], batch=2)

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("cuts", [[13], [1] * 13, [4, 2, 6, 1]], ids=str)
    def test_cuts(self, layer, cuts, batch):
        self.check(layer, cuts, batch)

    @pytest.mark.parametrize("mla", [DSA.mla, WIDER], ids=["one_scale", "two_scales"])
    def test_fp8_cache(self, mla):
        layer = layer_of(replace(DSA, mla=mla), FP8_SETUP)
        self.check(layer, [4, 2, 6, 1], batch=3)

    @torch.no_grad()
    def check(self, layer, cuts, batch):
        x = random_rows(sum(cuts), batch)
        whole, _ = layer(x.clone(), None)
        # Larger than the batch, and of NaN.
        context = StaticInferenceContext(batch + 1, sum(cuts) + 2)
        found = infer_in_steps(layer, SETUP, x, cuts, context)
        torch.testing.assert_close(found.to(whole), whole, atol=1e-12, rtol=0)

    @torch.no_grad()
    def test_reordered_requests(self, layer):
        """Megatron's ``swap_key_value_dict`` moves index keys, too."""
        x = random_rows(12, 3)
        context, order = StaticInferenceContext(3, 12), [2, 0, 1]
        infer_in_steps(layer, SETUP, x[:9], [9], context)
        context.swap_key_value_dict(order)
        found, _ = layer(x[9:, order].clone(), None, inference_context=context)
        whole, _ = layer(x.clone(), None)
        torch.testing.assert_close(found.to(whole), whole[9:, order], atol=1e-12, rtol=0)

    @torch.no_grad()
    def test_short_rows_are_dense(self, layer, monkeypatch):
        """Nothing is chosen up to top-k keys; their index keys are there for those after."""
        chosen = []
        over = core_attention.CachedTopKBackend
        monkeypatch.setattr(
            core_attention,
            "CachedTopKBackend",
            lambda sparse, keys: (chosen.append(keys), over(sparse, keys))[1],
        )
        x = random_rows(8, 2)
        whole, _ = layer(x.clone(), None)
        found = infer_in_steps(layer, SETUP, x, [3, 2, 1, 2])
        torch.testing.assert_close(found.to(whole), whole, atol=1e-12, rtol=0)
        assert [tuple(keys.shape) for keys in chosen] == [(2, DSA.topk), (4, DSA.topk)]


def host_of(layer, **config) -> Host:
    """A context in which nothing may see what no token was written to."""
    host = Host(layer, **config)
    width = layer.core_attention.dsa.head_dim
    allocate_index_keys(host.context, 1, width, torch.float64, world.device())
    host.context.index_keys.fill_(torch.nan)
    return host


class TestDynamic:
    @pytest.mark.parametrize(
        ("config", "name"),
        [({}, "layer"), (GRAPHS, "layer"), ({}, "fp8_layer"), (GRAPHS, "fp8_layer")],
        ids=["eager", "as-for-graphs", "eager-fp8", "as-for-graphs-fp8"],
    )
    def test_forwards_of_every_kind(self, config, name, request):
        """Rows of different lengths, decode beside a prompt in parts; NaN in unused slots."""
        host = host_of(request.getfixturevalue(name), **config)
        host.add(0, 63)
        host.add(1, 3)
        for _ in range(3):
            host.check(host.forward())
            host.end_step()
        host.add(2, 90, chunk=70)
        host.check(host.forward())
        host.end_step()
        host.add(2, 90)
        for _ in range(3):
            host.check(host.forward())
            host.end_step()
        # Request 0 has had blocks before and after those of the others.
        blocks = host.context.request_to_kv_block_ids[0, :2].tolist()
        assert abs(blocks[1] - blocks[0]) > 1

    def test_first_use_allocates(self, layer):
        host = Host(layer)
        host.add(0, 30)
        host.check(host.forward())
        assert tuple(host.context.index_keys.shape) == (1, 17, 64, DSA.width)

    def test_layers_of_a_stage(self):
        """Only layers with an indexer have memory; the model's fourth is this stage's first."""
        from absorbed_mla.inference.caches.dynamic import DynamicStep

        host = Host(layer_of())
        host.context.num_attention_layers = 3
        host.add(0, 30)
        step = DynamicStep(host.context, 3, _initialized(host.context), layer_offset=3)
        keys = random_rows(step.context.padded_active_token_count, 1)[..., : DSA.width]
        cache = step.write_index_keys(keys, (2, 4, 6, 7))
        assert tuple(host.context.index_keys.shape) == (2, 17, 64, DSA.width)
        assert cache.data_ptr() == host.context.index_keys[1].data_ptr()
        block = step.rows.block_table[0, 0]
        assert torch.equal(cache[block, :30], keys[:30, 0])

    @pytest.mark.parametrize("name", ["layer", "fp8_layer"])
    def test_capture(self, name, request):
        """Nothing waits for the device, in prefill and in decode."""
        layer = request.getfixturevalue(name)
        host = host_of(layer, **GRAPHS)
        host.add(0, 63)
        host.add(1, 5)
        for _ in range(2):
            tokens = _initialized(host.context)
            hidden = torch.zeros(tokens, 1, DSA.hidden, dtype=torch.float64, device=world.device())
            with torch.inference_mode(), Captured():
                layer(hidden, None, inference_context=host.context)
            host.end_step()

    def test_no_memory_while_a_graph_is_captured(self, layer, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        host = Host(layer)
        with refusal("before a CUDA graph is captured", "allocate_index_keys"):
            allocate_index_keys(host.context, 1, 4, torch.float64, torch.device("cpu"))

    @pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
    def test_suspended(self, layer, mode, monkeypatch):
        """Freed and made again with the latents."""
        from megatron.core.inference.config import KVCacheManagementMode

        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        host = Host(layer, kv_cache_management_mode=KVCacheManagementMode(mode))
        host.add(0, 30)
        host.check(host.forward())
        host.end_step()
        before = host.context.index_keys.clone()
        host.context.deallocate_inference_state_buffers()
        if mode == "recompute":
            assert not hasattr(host.context, "index_keys")
        elif mode == "offload":
            assert not host.context.index_keys.storage().size()
        host.context.reinitialize_inference_state_buffers()
        assert host.context.index_keys.shape == before.shape
        if mode != "recompute":
            host.check(host.forward())


class TestSelections:
    @torch.inference_mode()
    def test_recorded(self, layer):
        """Positions in its request for every new token; those of training."""
        host = host_of(layer)
        host.add(0, 20)
        with record_selections(layer) as cached:
            host.forward()
            host.end_step()
            host.forward()
        with record_selections(layer) as whole:
            layer(host.texts[0].clone(), None)
        [expected] = next(iter(whole.values()))
        prefill, decode = next(iter(cached.values()))
        assert torch.equal(prefill[:20], expected[:20, 0])
        assert torch.equal(decode[:1], expected[20:, 0])
        assert bool((prefill[20:] == -1).all()), "padding chooses nothing"

    @torch.inference_mode()
    def test_no_replay(self, layer):
        x = random_rows(8, 1)
        with record_selections(layer) as selections:
            layer(x.clone(), None)
        context = StaticInferenceContext(1, 8)
        with (
            replay_selections(layer, selections),
            refusal("replay_selections", "inference_context"),
        ):
            layer(x.clone(), None, inference_context=context)
