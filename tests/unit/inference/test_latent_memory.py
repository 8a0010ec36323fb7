"""Latents on the device and in host memory."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.inference.latent_memory import LatentMemory
from absorbed_mla.inference.step import choose_cache
from tests.support import world
from tests.support.refusal import refusal

BATCH, WIDTH = 2, 3


def offloaded(resident: int, behind: int, chunk: int) -> LatentMemory:
    host = torch.full((behind, BATCH, WIDTH), torch.nan, pin_memory=torch.cuda.is_available())
    near = torch.full((resident, BATCH, WIDTH), torch.nan, device=world.device())
    return LatentMemory(near, host, chunk)


class TestOffloaded:
    @pytest.mark.parametrize("chunk", [1, 3, 4, 100])
    @pytest.mark.parametrize("steps", [(13,), (1,) * 13, (4, 1, 1, 7), (3, 2, 8)])
    def test_everything_once(self, steps, chunk):
        """Every position below the end comes in one part, in order, whole."""
        memory = offloaded(4, 12, chunk)
        kv = torch.arange(13 * BATCH * WIDTH, dtype=torch.float32).view(13, BATCH, WIDTH)
        kv, done = kv.to(world.device()), 0
        for size in steps:
            memory.write(done, slice(0, BATCH), kv[done : done + size])
            done += size
            seen = []
            for part in memory.parts(None, slice(0, BATCH), done):
                assert part.start == len(seen)
                keys = part.cache.transpose(0, 1)[: part.end - part.start]
                seen += keys[: done - part.start].clone().cpu()
            assert torch.equal(torch.stack(seen), kv[:done].cpu())

    def test_requests(self):
        memory = offloaded(2, 4, 2)
        for request in range(BATCH):
            mine = slice(request, request + 1)
            memory.write(0, mine, torch.full((5, 1, WIDTH), float(request), device=world.device()))
        for request in range(BATCH):
            mine = slice(request, request + 1)
            for part in memory.parts(None, mine, 5):
                count = min(part.end, 5) - part.start
                assert part.cache[:, :count].eq(request).all() and len(part.cache) == 1

    def test_two_buffers(self):
        """What streams takes two chunks of memory, however many there are."""
        memory = offloaded(2, 64, 4)
        parts = [*memory.parts(None, slice(0, BATCH), 66)][1:]
        assert len(parts) == 16
        storages = {part.cache.untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 2


class TestStaticContext:
    def open(self, context, tokens=4, batch=BATCH, dtype=torch.float32, owner=None, **options):
        kv = torch.zeros(tokens, batch, WIDTH, dtype=dtype, device=world.device())
        options = AbsorbedMLAOptions(**options)
        return choose_cache(context).open(context, 7, lambda: 0, kv, options, owner or type(self))

    def test_only_latents_are_kept(self):
        """C + rope numbers per token and layer, and nothing else."""
        context = StaticInferenceContext(BATCH, 16)
        self.open(context)
        assert [*context.key_value_memory_dict] == [7]
        kept = context.key_value_memory_dict[7]
        assert sum(tensor.numel() for tensor in kept) == 16 * BATCH * WIDTH

    def test_split_by_the_option(self):
        context = StaticInferenceContext(BATCH, 16)
        self.open(context, latent_cache_tokens=10)
        assert [len(tensor) for tensor in context.key_value_memory_dict[7]] == [10, 6]

    def test_tables_are_made_once_for_all_layers(self):
        """They belong to the context, which keeps those of its latest forwards."""
        context = StaticInferenceContext(BATCH, 16)
        rows = [self.open(context, tokens).rows for tokens in range(1, 10)]
        assert rows[8] is self.open(context, 9).rows
        assert rows[0] is not self.open(context, 1).rows
        assert rows[8] is not self.open(StaticInferenceContext(BATCH, 16), 9).rows

    def test_requests_change_places(self):
        """Megatron's own reordering applies to latents on either side."""
        context = StaticInferenceContext(BATCH, 6)
        step = self.open(context, tokens=6, latent_cache_tokens=4)
        kv = torch.arange(6.0)[None].repeat(BATCH, 1) + 10 * torch.arange(BATCH)[:, None]
        step.write(kv.view(-1, 1, 1).expand(-1, -1, WIDTH).to(world.device()))
        context.swap_key_value_dict([1, 0])
        step = self.open(context, tokens=6, latent_cache_tokens=4)
        first = [part.cache[0, :, 0].clone() for part in step.parts()]
        assert torch.cat(first)[:6].tolist() == [10, 11, 12, 13, 14, 15]

    @pytest.mark.parametrize(
        ("offset", "value", "parts"),
        [
            ("sequence_len_offset", 3, ("max_sequence_length=5", "needs 7", "larger max_sequence")),
            ("batch_size_offset", 1, ("max_batch_size=2", "needs 3")),
        ],
    )
    def test_no_room(self, offset, value, parts):
        context = StaticInferenceContext(BATCH, 5)
        setattr(context, offset, value)
        with refusal(*parts):
            self.open(context)

    def test_context_of_another_model(self):
        context = StaticInferenceContext(BATCH, 5)
        self.open(context)
        with refusal("layer 7", "one context per model"):
            self.open(context, dtype=torch.float64)

    @pytest.mark.parametrize("offset", ["sequence_len_offset", "batch_size_offset"])
    def test_context_of_another_model_of_the_same_dimensions(self, offset):
        """It would continue the other one's prompts, and say nothing."""
        context, mine, theirs = StaticInferenceContext(BATCH, 5), torch.nn.Module(), world
        self.open(context, owner=mine, batch=1)
        setattr(context, offset, 1)
        self.open(context, owner=mine, batch=1)
        with refusal("another model's latents for layer 7", "one context per model"):
            self.open(context, owner=theirs, batch=1)
        context.reset()
        self.open(context, owner=theirs, batch=1)
        setattr(context, offset, 1)
        with refusal("another model's latents"):
            self.open(context, owner=mine, batch=1)

    def test_dynamic_context_has_its_own_way(self):
        context = SimpleNamespace(is_static_batching=lambda: False)
        with refusal("latent_cache_tokens needs a StaticInferenceContext"):
            self.open(context, batch=1, latent_cache_tokens=4)
