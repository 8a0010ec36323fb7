"""Absorbed attention over a paged cache in plain PyTorch."""

import random
from dataclasses import replace

import pytest
import torch

from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from tests.support.hostile import poisoned_memory
from tests.support.paged import TWO_ROWS, PagedCase, naive

MIXED = PagedCase((1, 3, 0, 5), (70, 3, 9, 150), dtype=torch.float64, padding=3)

CASES = {
    **{f"block_{size}": replace(MIXED, block_size=size) for size in (1, 16, 64, 100)},
    **{f"heads_{heads}": replace(MIXED, heads=heads) for heads in (1, 8, 40, 128)},
    "one_key": PagedCase((1, 1), (1, 1), dtype=torch.float64),
    "prefixes": replace(MIXED, prefixes=4),
    "two_rows": replace(TWO_ROWS, dtype=torch.float64),
    "no_rope": replace(MIXED, rope=0),
    "huge": replace(MIXED, magnitude=1e4),
    "tiny": replace(MIXED, magnitude=1e-8),
    "more_tokens_than_keys": PagedCase((5, 2), (3, 2), dtype=torch.float64),
    "nothing_new": PagedCase((0, 0), (5, 70), dtype=torch.float64, padding=2),
    "many_tokens": PagedCase((300, 1), (310, 1), heads=1, dtype=torch.float64),
}


def check(inputs, *window):
    """Output and LSE, which are those of a softmax in fp64."""
    out, lse = paged_reference(*inputs, *window)
    expected, expected_lse = naive(*inputs, *window)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-10)
    torch.testing.assert_close(lse, expected_lse, atol=1e-13, rtol=1e-12)
    return out, lse


@pytest.mark.parametrize("name", CASES)
def test_equals_a_softmax(name):
    inputs = CASES[name].inputs()
    with poisoned_memory():
        check(inputs)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_dtypes(dtype, error):
    """fp32 arithmetic; the output is rounded to the query's dtype."""
    inputs = replace(MIXED, dtype=dtype).inputs()
    out, lse = paged_reference(*inputs)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected, expected_lse = naive(*inputs)
    torch.testing.assert_close(out.double(), expected, atol=error, rtol=error)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "window", [(0, 1), (0, 64), (37, 100), (64, None), (149, None), (150, None)]
)
def test_windows(window):
    """The cache given begins at the window; rows that end before it see nothing."""
    check(replace(MIXED, window=window).inputs(), *window)


def test_rows_in_any_order_with_padding_between():
    _, lse = check(replace(MIXED, starts=(11, 0, 3, 4)).inputs())
    assert (lse[:, 0] == -torch.inf).nonzero().flatten().tolist() == [3, 9, 10]


def test_a_cache_without_blocks():
    q_content, q_rope, cache, rows, scale = MIXED.inputs()
    empty = rows.block_table[:, :0]
    rows = replace(rows, kv_lengths=rows.query_lengths * 0, block_table=empty, max_kv_length=0)
    out, lse = paged_reference(q_content, q_rope, cache[:0], rows, scale)
    assert not out.any() and (lse == -torch.inf).all()


class TestBatchInvariance:
    """The bits of a token, whatever is computed beside it."""

    @pytest.mark.parametrize("seed", range(12))
    def test_any_composition(self, seed):
        """Other rows, chunks of the prompt, blocks, and longer tables."""
        draw = random.Random(seed)
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64])
        heads, content, rope = draw.choice([1, 3, 16]), *draw.choice([(16, 8), (64, 16), (512, 64)])
        keys = draw.randint(1, 200)
        make = torch.Generator().manual_seed(seed)
        latent, *query = (
            torch.randn(shape, generator=make).to(dtype)
            for shape in ((keys, content + rope), (keys, heads, content), (keys, heads, rope))
        )
        whole = self._chunk(draw, make, latent, query, 0, keys, alone=True)
        for _ in range(3):
            cuts = sorted({0, keys, *(draw.randint(0, keys) for _ in range(draw.randint(0, 3)))})
            parts = [
                self._chunk(draw, make, latent, query, *bounds) for bounds in zip(cuts, cuts[1:])
            ]
            for found, expected in zip(zip(*parts), whole):
                assert torch.equal(torch.cat(found), expected)

    def _chunk(self, draw, make, latent, query, start, end, alone=False):
        """Tokens ``start`` to ``end`` of the sequence, among rows of others."""
        others = 0 if alone else draw.randint(0, 3)
        me, size = draw.randint(0, others), draw.choice([1, 16, 64, 100])
        lengths = [draw.randint(0, 9) for _ in range(others)]
        kv_lengths = [length + draw.randint(0, 90) for length in lengths]
        lengths.insert(me, end - start)
        kv_lengths.insert(me, end)
        width = -(-max(kv_lengths) // size) + draw.randint(0, 2)
        cache = torch.randn(len(lengths) * width + 2, size, latent.shape[1], generator=make).to(
            latent.dtype
        )
        table = torch.randperm(len(cache), generator=make)[: len(lengths) * width].int()
        rows = Rows.of(lengths, kv_lengths, table.view(len(lengths), width))
        position = torch.arange(end)
        cache[rows.block_table[me][position // size].long(), position % size] = latent[:end]
        first = int(rows.query_starts[me])
        inputs = []
        for part in query:
            tokens = torch.randn(sum(lengths) + others, *part.shape[1:], generator=make)
            inputs.append(tokens.to(part.dtype))
            inputs[-1][first : first + end - start] = part[start:end]
        out, lse = paged_reference(*inputs, cache, rows, 0.1, batch_invariant=True)
        mine = slice(first, first + end - start)
        return out[mine], lse[mine]
