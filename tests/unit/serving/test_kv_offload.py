"""A cache that is partly in host memory: the tokens and log-probs of whole forwards."""

from typing import ClassVar

import pytest
import torch

from absorbed_mla.inference.kv_offload import context
from absorbed_mla.inference.kv_offload.blocks import OffloadedBlocks, cuts_of, runs_of
from absorbed_mla.inference.rows import Rows
from absorbed_mla.options import AbsorbedMLAOptions
from tests.support import world
from tests.support.copy_streams import record
from tests.support.dsa_models import generating_fields
from tests.support.engine import (
    KEPT,
    Request,
    Run,
    add,
    assert_generates,
    engine_of,
    generate,
    generating_model,
    prompt,
)
from tests.support.refusal import refusal

# 5 blocks on the device, which are 320 tokens.
SMALL = {
    "max_sequence_length": 2048,
    "max_requests": 2,
    "step_tokens": 64,
    "chunked_prefill": True,
    "blocks": 5,
    "host_cache_tokens": 40 * 64,
}
LONG = Request(prompt(700, seed=1), 12)
TWO = [Request(prompt(450, seed=2), 9), Request(prompt(90, seed=3), 16)]


@pytest.fixture(autouse=True)
def few_staged(monkeypatch):
    """Buffers of three blocks, so that every step has several windows."""
    monkeypatch.setattr(context, "STAGED_BLOCKS", 3)


def with_large_cache(model, requests):
    """Results with all blocks on the device."""
    large = {**SMALL, "blocks": 45, "host_cache_tokens": 0}
    return generate(engine_of(model, **large), requests, log_probs=True).results


class TestTokens:
    @pytest.mark.parametrize("cached", ["model", "fp8"])
    def test_one_context_of_several_devices(self, cached):
        """712 tokens over the 320 that the device holds."""
        options = AbsorbedMLAOptions(context_chunk_size=100, latent_cache_dtype=cached)
        model = generating_model(options, num_layers=1)
        found = generate(engine_of(model, **SMALL), [LONG], log_probs=True)
        assert found.statistics.streamed_blocks > 12 * 6
        assert_generates(found, with_large_cache(model, [LONG]))

    @pytest.mark.parametrize("form", ["absorbed", "expanded"])
    def test_streams_far_apart(self, form, monkeypatch):
        """Copies that are late, and attention that is later than the copies after it."""
        model = generating_model(AbsorbedMLAOptions(form=form, context_chunk_size=100))
        expected = with_large_cache(model, [LONG, *TWO])
        streams = record(monkeypatch)
        found = generate(engine_of(model, **SMALL), [LONG, *TWO], log_probs=True)
        assert_generates(found, expected)
        assert len(streams.ahead) > 100

    def test_blocks_return(self, model):
        """A request that fits is not streamed any more once it is alone."""
        requests = [Request(prompt(200, seed=5), 60), Request(prompt(500, seed=6), 2)]
        engine = engine_of(model, **SMALL)
        streamed = []
        with engine:
            add(engine, requests, log_probs=True)
            while engine.is_busy():
                engine.step()
                streamed.append(engine.host.context.tiers.num_streamed)
            run = Run([engine.results[number] for number in range(2)], engine.statistics)
        assert max(streamed) > 5 and not any(streamed[-20:])
        assert_generates(run, with_large_cache(model, requests))

    def test_prefix_cache(self, model):
        """Blocks that no request has are the first to leave the device, and are found again."""
        shared = [Request(prompt(450, seed, shared=300), 8) for seed in (7, 8)]
        with engine_of(model, **SMALL, **KEPT) as engine:
            for request in [*shared, *TWO]:
                run = generate(engine, [request], log_probs=True)
                assert_generates(run, with_large_cache(model, [request]))
            again = generate(engine, shared[:1], log_probs=True)
        assert again.statistics.prefix_blocks == 7
        assert_generates(again, with_large_cache(model, shared[:1]))

    def test_prefix_cache_on_disk(self, model, tmp_path):
        """Blocks are written from either place, and read into either."""
        options = {**SMALL, "prefix_caching": True, "prefix_cache_dir": tmp_path}
        expected = with_large_cache(model, TWO[:1])
        for disk_blocks in (0, 7):
            run = generate(engine_of(model, **options), TWO[:1], log_probs=True)
            assert run.statistics.disk_blocks == disk_blocks
            assert_generates(run, expected)

    CASES: ClassVar = {
        # The short one ends first, and blocks of the other return to its place.
        "several": (
            [*TWO, Request(prompt(300, seed=4), 30)],
            {},
            lambda done: done.streamed_blocks and done.most_rows == 2,
        ),
        # Too little host memory for both requests.
        "evicted": (
            [Request(prompt(370, seed), 24) for seed in (9, 10)],
            {"host_cache_tokens": 7 * 64},
            lambda done: done.evicted,
        ),
        # A step finds the blocks of the requests that run.
        **{
            f"paused-{lengths[0]}": (
                [Request(prompt(length, 9 + i), 24) for i, length in enumerate(lengths)],
                {"host_cache_tokens": 6 * 64, "paused_blocks": 4},
                lambda done: done.most_paused and done.streamed_blocks > 12,
            )
            for lengths in ((300, 120), (120, 300))
        },
        "drafts": (
            TWO,
            {"num_speculative_tokens": 2},
            lambda done: done.drafted and done.streamed_blocks,
        ),
    }

    @pytest.mark.parametrize(("requests", "options", "happened"), CASES.values(), ids=CASES)
    def test_requests_beside_each_other(self, model, drafting, requests, options, happened):
        model = drafting if "num_speculative_tokens" in options else model
        run = generate(engine_of(model, **{**SMALL, **options}), requests, log_probs=True)
        assert happened(run.statistics), run.statistics
        assert_generates(run, with_large_cache(model, requests))

    def test_nothing_in_host_memory(self, model):
        """The same bits as without it."""
        requests = [Request(prompt(120, seed), 9) for seed in (11, 12)]
        without = {**SMALL, "blocks": 10, "host_cache_tokens": 0}
        expected = generate(engine_of(model, **without), requests, log_probs=True)
        found = generate(engine_of(model, **{**SMALL, "blocks": 10}), requests, log_probs=True)
        assert not found.statistics.streamed_blocks
        assert found.results == expected.results


class TestMoving:
    """Random steps; every block keeps what was written to it."""

    def test_contents(self):
        generator = torch.Generator().manual_seed(0)

        def random(count: int) -> torch.Tensor:
            return torch.randperm(count, generator=generator)

        tiers = OffloadedBlocks(
            layers=2,
            device_blocks=7,
            host_blocks=9,
            block=(4, 3),
            dtype=torch.float32,
            device=world.device(),
            staged=3,
        )
        tiers.resident.zero_()
        tiers.host.zero_()
        expected: dict[int, torch.Tensor] = {}
        for step in range(60):
            chosen = random(15)
            table = chosen[:12].view(2, 6)
            used = torch.randint(1, 7, (2,), generator=generator)
            written = torch.stack([row[count - 1] for row, count in zip(table, used)])
            free = chosen[12:]
            for block in free.tolist():
                expected.pop(block, None)
            tiers.begin_step(table, used, written, free, num_rows=3)
            assert tiers.host_block(15) is None, "Megatron's padding stays on the device"
            for layer in range(2):
                values = torch.full((2, 3), float(step * 2 + layer + 1), device=world.device())
                places = torch.zeros(2, dtype=torch.long, device=world.device())
                tiers.write(layer, places, values)
            for block in written.tolist():
                found = expected.setdefault(block, tiers.read_block(block))
                found[:, 0] = torch.tensor([step * 2.0 + 1, step * 2.0 + 2])[:, None]
            for block, latents in expected.items():
                assert torch.equal(tiers.read_block(block), latents), (step, block)
            self._check_parts(tiers, table, used)

    def _check_parts(self, tiers, table, used):
        """Every key is in one part, where its block table says."""
        empty = torch.zeros(3, 6, device=world.device())
        rows = Rows.of([1, 1, 0], [4 * n for n in used.tolist()] + [0], empty)
        for layer in range(2):
            column = 0
            for part in tiers.parts(layer, rows, None):
                assert part.start == 4 * column
                assert int(part.rows.block_table.max()) < len(part.cache)
                for row, count in enumerate(used.tolist()):
                    for place, block in enumerate(part.rows.block_table[row].tolist()):
                        if column + place < count:
                            wanted = tiers.read_block(int(table[row, column + place]))[layer]
                            assert torch.equal(part.cache[block].cpu(), wanted)
                column += part.rows.block_table.shape[1]
            assert column == int(used.max()) and part.end is None


@pytest.mark.parametrize(
    ("counts", "cuts"),
    [
        ([0, 0], [(0, 2)]),
        ([2, 1, 3, 0, 1], [(0, 2), (2, 4), (4, 5)]),
        ([3, 3, 0], [(0, 1), (1, 3)]),
    ],
)
def test_cuts(counts, cuts):
    assert cuts_of(counts, 3) == cuts


def test_runs():
    assert runs_of([4, 5, 6, 1, 3, 4]) == ((0, 4, 3), (3, 1, 1), (4, 3, 2))
    assert runs_of([]) == ()


def test_refused(model):
    parity = generating_model(AbsorbedMLAOptions(batch_invariant=True))
    sparse = generating_model(**generating_fields())
    with refusal("host_cache_tokens must be 0 with batch_invariant"):
        engine_of(parity, **SMALL)
    with refusal("host_cache_tokens must be 0 for", "'dsa', got 2560"):
        engine_of(sparse, **SMALL)
    with refusal("needs cache_tokens of at least 320 for 2 requests"):
        engine_of(model, **{**SMALL, "blocks": 4})
