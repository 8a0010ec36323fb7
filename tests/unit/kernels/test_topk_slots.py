"""Slots and counts of positions in a paged cache, beside their twin in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from absorbed_mla.dsa.cached_attention import attend_cached
from absorbed_mla.dsa.cached_keys import CachedRows
from absorbed_mla.dsa.key_subset import chosen_keys
from absorbed_mla.dsa.sparse_reference import sparse_forward
from absorbed_mla.dsa.tiled_sparse import tiled_sparse_forward
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.backends.reference import last_keys
from absorbed_mla.inference.rows import Rows
from absorbed_mla.registry import SPARSE_BACKENDS
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.combinations import grid
from tests.support.gpu_calls import capture
from tests.support.hostile import poisoned_memory
from tests.support.numerics import relative_error
from tests.unit.kernels.test_sparse_kernels import hopper

pytest.importorskip("triton.experimental.gluon")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOPK, WIDTH = 12, 48

with triton_interpreter():
    from absorbed_mla.kernels.dsa import forward  # noqa: F401
    from absorbed_mla.kernels.dsa import key_lists as lists_module
    from absorbed_mla.kernels.dsa import splits as splits_module
    from absorbed_mla.kernels.dsa import topk_slots as module


@dataclass(frozen=True)
class Case:
    """Requests of a step, the last of which is padding, and tokens that belong to none."""

    block_size: int = 16
    new: tuple[int, ...] = (1, 3, 2, 0)
    keys: tuple[int, ...] = (40, 9, 33, 0)
    loose: int = 2
    table: torch.dtype = torch.int32
    interleaved: bool = False  # a cache whose positions lie apart, blocks of a wider table
    holes: bool = False
    one_block: bool = False

    def rows(self) -> Rows:
        """Blocks in random order; entries behind the last used one are no blocks."""
        used = [-(-keys // self.block_size) for keys in self.keys]
        table = torch.full((len(used), max(used) + 1), 2**30, dtype=self.table)
        order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(5))
        for row, blocks in zip(table, order.split(used)):
            row[: len(blocks)] = blocks
        table = table.to(DEVICE)
        if self.interleaved:
            table = torch.stack((table, table + 7), -1)[..., 0]
        if self.one_block:
            table = table[:, :1]
        return Rows.of(self.new, self.keys, table)

    def cache(self, width: int = WIDTH) -> Tensor:
        """Between its positions NaN, if they lie apart."""
        blocks = sum(-(-keys // self.block_size) for keys in self.keys)
        parts = 3 if self.interleaved else 1
        shape = self.block_size, blocks, parts, width
        make = torch.Generator().manual_seed(6)
        memory = torch.randn(shape, generator=make).to(DEVICE)
        memory[:, :, 1:] = torch.nan
        # As Megatron's static caches lie, position by position.
        cache = memory[:, :, 0].transpose(0, 1)
        return cache if self.interleaved else cache.contiguous()

    def chosen(self) -> Tensor:
        """Positions [T, topk] that a token sees, some fewer than topk; none of loose tokens."""
        make = torch.Generator().manual_seed(7)
        chosen = torch.full((sum(self.new) + self.loose, TOPK), -1, dtype=torch.int32)
        token = 0
        for new, keys in zip(self.new, self.keys):
            for index in range(new):
                seen = torch.randperm(keys - new + index + 1, generator=make)[:TOPK].sort().values
                chosen[token, : len(seen)] = seen.int()
                token += 1
        if self.holes:
            chosen[0, 3] = chosen[1, :5] = -1
        return chosen.to(DEVICE)


CASES = {
    "blocks_of_16": Case(),
    "blocks_of_7": Case(7, loose=0),
    "blocks_of_one": Case(1, table=torch.int64),
    "whole_requests": Case(64, one_block=True),
    "interleaved": Case(16, interleaved=True),
    "holes": Case(5, holes=True, table=torch.int64, interleaved=True),
    "many_rows": Case(4, new=(0,) * 140 + (2, 1), keys=(0,) * 140 + (9, 30)),
}


def places_of(cached: CachedRows, rows: Rows) -> module.Places:
    lists = rows.query_starts, rows.query_lengths, rows.block_table
    return module.Places(*lists, cached.block_size, cached.of_block, cached.of_position)


@grid(1, {"name": [*CASES], "splits": [4, 1]})
def test_slots_and_counts(name, splits):
    """Exactly those of PyTorch, and of the lists of a selection; loose tokens have none."""
    case = CASES[name]
    cached, rows, chosen = CachedRows(case.cache()), case.rows(), case.chosen()
    row, _ = last_keys(rows, len(chosen))
    slots = cached.slots(chosen, rows.block_table[row]).unsqueeze(1)
    for tokens in (1,) if splits > 1 else (1, 4):
        expected = lists_module.key_lists(slots, len(cached.rows), tokens, splits)
        with poisoned_memory():
            found = module.topk_slots(
                chosen, places_of(cached, rows), len(cached.rows), tokens, splits
            )
        if tokens == 1:
            assert torch.equal(found.entries, expected.entries)
        else:  # behind the count there is anything
            for one, other, count in zip(found.entries, expected.entries, expected.counts):
                assert torch.equal(one[:, :count], other[:, :count])
        assert torch.equal(found.counts, expected.counts)
        assert torch.equal(found.open_counts, expected.open_counts)


def test_tokens_in_no_row_have_no_keys():
    """Whatever was chosen for them, as padding may hold anything."""
    case = Case(loose=1)
    cached, rows, chosen = CachedRows(case.cache()), case.rows(), case.chosen()
    chosen[-1] = torch.arange(TOPK)
    found = module.topk_slots(chosen, places_of(cached, rows), len(cached.rows), 1, 2)
    assert (found.entries[-1] == -1).all() and not found.counts[-1].any()
    assert not found.open_counts[-1].any() and found.counts[:-1].all(1).any()


@pytest.mark.parametrize(("tokens", "topk", "requests"), [(0, 8, 1), (3, 0, 1), (3, 8, 0)])
def test_nothing_to_do(tokens, topk, requests):
    chosen = torch.zeros(tokens, topk, dtype=torch.int32, device=DEVICE)
    numbers = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
    places = module.Places(numbers, numbers, numbers[:, None], 16, 16, 1)
    found = module.topk_slots(chosen, places, 16, 1)
    assert found.counts.shape == (tokens, 1) and not found.counts.any()


@grid(1, {"name": [*CASES], "splits": [1, 4]})
def test_attention(name, splits, monkeypatch):
    """The package's path, in splits and not, beside plain PyTorch's."""
    monkeypatch.setattr(splits_module, "_LEAST_KEYS", TOPK // splits)
    case = CASES[name]
    cache, rows, chosen = case.cache(), case.rows(), case.chosen()
    make = torch.Generator().manual_seed(8)
    query = torch.randn(len(chosen), 3, WIDTH, generator=make).to(DEVICE)
    inputs = *query.split([32, 16], -1), cache, rows, chosen, 0.2
    expected = attend_cached(sparse_forward, *inputs)
    with poisoned_memory():
        found = SPARSE_BACKENDS["triton"].forward_cached(*inputs)
    torch.testing.assert_close(found.out, expected.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-5, rtol=1e-5)


FP8_CASES = ("blocks_of_7", "interleaved", "holes")
LATENTS = Fp8Latents(256, 16)


def fp8_inputs(case: Case, heads: int, dtype: torch.dtype) -> tuple[tuple, tuple]:
    """Inputs over FP8 rows with two scales, between which everything is NaN, and over their keys.

    The values of the second group are a hundred times those of the first.
    """
    kv = case.cache(272)
    kv[..., 128:256] *= 100
    rows = LATENTS.encode(kv)
    parts = 3 if case.interleaved else 1
    cache = torch.full((*rows.shape[:2], parts, LATENTS.row_bytes), 0xFF, dtype=torch.uint8)
    cache = cache.to(DEVICE)[:, :, 0].copy_(rows)
    chosen, make = case.chosen(), torch.Generator().manual_seed(8)
    query = torch.randn(len(chosen), heads, 272, generator=make)
    query[..., 128:256] /= 100
    query = query.to(DEVICE, dtype).split([256, 16], -1)
    more = case.rows(), chosen, 0.1
    return (*query, cache, *more), (*query, LATENTS.decode(rows, dtype), *more)


@pytest.mark.parametrize("forward", [sparse_forward, tiled_sparse_forward])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FP8_CASES)
def test_reference_over_fp8_rows(name, dtype, forward, monkeypatch):
    """With the bits of the same over decoded rows, in chunks of two tokens."""
    monkeypatch.setattr(chosen_keys, "__defaults__", (2 * TOPK * 272,))
    rows, decoded = fp8_inputs(CASES[name], 3, dtype)
    found = attend_cached(forward, *rows)
    expected = attend_cached(forward, *decoded)
    assert found.out.isfinite().all()
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


def with_the_bits_of(kernels, rows: tuple, decoded: tuple):
    with triton_interpreter(), poisoned_memory():
        found = kernels.forward_cached(*rows)
    with triton_interpreter():
        expected = kernels.forward_cached(*decoded)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    return found


@pytest.mark.parametrize(("name", "splits"), [("holes", 4), ("interleaved", 1)])
def test_attention_over_fp8_rows(name, splits, monkeypatch):
    """The kernels' bits over decoded rows: in fp32 they compute as many keys at a time."""
    monkeypatch.setattr(splits_module, "_LEAST_KEYS", TOPK // splits)
    rows, decoded = fp8_inputs(CASES[name], 3, torch.float32)
    for kernels in (SPARSE_BACKENDS["triton"], SPARSE_BACKENDS["triton"].invariant):
        found = with_the_bits_of(kernels, rows, decoded)
    truth = attend_cached(sparse_forward, *rows)
    torch.testing.assert_close(found.out, truth.out, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(found.lse, truth.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.no_cover
@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_over_fp8_rows_in_bf16(tokens, monkeypatch):
    """Four tokens of 16 heads in a tile, or one; blocks of keys are those of decoded rows."""
    monkeypatch.setattr(lists_module, "_LEAST_QUERIES", 1 if tokens == 4 else 1024)
    rows, decoded = fp8_inputs(Case(new=(5, 3), keys=(40, 9), loose=1), 16, torch.bfloat16)
    found = with_the_bits_of(SPARSE_BACKENDS["triton"], rows, decoded)
    truth = attend_cached(sparse_forward, *rows)
    assert relative_error(found.out.float(), truth.out) < 1e-2


@pytest.mark.no_cover
def test_attention_on_hopper(monkeypatch):
    """Its launches, in splits; three tokens of 20 heads."""
    monkeypatch.setattr(splits_module, "_LEAST_KEYS", TOPK // 4)
    case = Case(new=(1, 2), keys=(40, 9), loose=1)
    cache, rows, chosen = case.cache(192), case.rows(), case.chosen()
    query = torch.randn(len(chosen), 20, 192, generator=torch.Generator().manual_seed(8))
    query, cache = query.to(DEVICE, torch.bfloat16), cache.bfloat16()
    inputs = *query.split([128, 64], -1), cache, rows, chosen, 0.1
    wide = (x.float() for x in inputs[:3])
    expected = attend_cached(sparse_forward, *wide, *inputs[3:])
    with hopper(), poisoned_memory():
        found = SPARSE_BACKENDS["hopper"].forward_cached(*inputs)
    torch.testing.assert_close(found.out.float(), expected.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found.lse, expected.lse, atol=2e-2, rtol=1e-3)


@needs.gpu
@pytest.mark.parametrize("kernels", ["hopper", "triton_fp8"])
@pytest.mark.parametrize("heads", [16, 128])
def test_in_a_graph(heads, kernels):
    """32 requests at DeepSeek-V3's widths; the graph reads what is there when it is replayed.

    By ``hopper``, or over FP8 rows by ``triton``.
    """
    make = torch.Generator("cuda").manual_seed(9)
    like = {"device": DEVICE, "dtype": torch.bfloat16, "generator": make}
    cache = torch.randn(32 * 64, 64, 576, **like)
    order = torch.randperm(32 * 64, device=DEVICE, generator=make).int().view(32, 64)
    rows = Rows.of([1] * 32, [4096] * 32, order)
    scores = torch.rand(2, 32, 4096, device=DEVICE, generator=make)
    first, second = scores.topk(2048).indices.sort(-1).values.int()
    second[3, 700:] = -1
    chosen = first.clone()
    query = torch.randn(32, heads, 576, **like).split([512, 64], -1)
    held = cache
    if kernels == "triton_fp8":
        latents = Fp8Latents(512, 64)
        held = latents.encode(cache)
        cache = latents.decode(held, torch.bfloat16)
    inputs = *query, held, rows, chosen, 576**-0.5
    attend = SPARSE_BACKENDS[kernels.removesuffix("_fp8")].forward_cached
    graph, found = capture(lambda: attend(*inputs))
    for positions in (first, second):
        chosen.copy_(positions)
        graph.replay()
        wide = (x.float() for x in (*query, cache))
        expected = attend_cached(sparse_forward, *wide, rows, chosen, 576**-0.5)
        error = (found.out.float() - expected.out).norm() / expected.out.norm()
        assert error < 5e-3
        torch.testing.assert_close(found.lse, expected.lse, atol=2e-3, rtol=1e-3)
