"""Attention over the shares of a cache that ranks keep, as over the whole cache."""

from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.inference.backends.reference import ENTRY as REFERENCE
from absorbed_mla.inference.caches.dynamic import DynamicCache
from absorbed_mla.inference.decode_context_parallel import attention
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.decode_context_parallel.support import require_shares
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import PAGED_BACKENDS
from tests.support import needs, world
from tests.support.paged import PagedCase
from tests.support.shares import RankAlone, by_shares

# Rows of one token; of several, of none, and as long as a block.
ROWS = {
    "decode": ((1, 1, 1, 1, 1), (1, 2, 64, 65, 200)),
    "chunks": ((5, 1, 3, 70, 0), (5, 130, 3, 199, 0)),
}


@pytest.mark.parametrize("size, piece", [(2, 2**16), (4, 100), (64, 2**16)])
@pytest.mark.parametrize("rows", ROWS)
def test_shares(size, rows, piece, monkeypatch):
    monkeypatch.setattr(attention, "_TOKEN_HEADS", piece)
    case = PagedCase(*ROWS[rows], block_size=64, dtype=torch.float64, padding=2)
    inputs = case.inputs()
    found, expected = by_shares(REFERENCE, size, *inputs), REFERENCE.forward(*inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@needs.gpu
@pytest.mark.parametrize("name", ["triton", "hopper"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [2, 4])
def test_kernels(name, rows, size):
    """The rank's pages are of 32 and 16 tokens, and some ranks have no key of a short row."""
    case = PagedCase(*ROWS[rows], heads=16, block_size=64, kv_lora_rank=512, rope=64, padding=2)
    inputs = case.inputs(world.device())
    out, lse = by_shares(PAGED_BACKENDS[name], size, *inputs)
    expected = REFERENCE.forward(*inputs)
    torch.testing.assert_close(out, expected[0].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-2)


def test_every_token_is_one_ranks():
    ranks = [RankAlone(rank, 4) for rank in range(4)]
    for tokens in (0, 1, 3, 4, 63, 64, 65):
        counts = [one.count(tokens) for one in ranks]
        assert sum(counts) == tokens and max(counts) - min(counts) <= 1
    block, position = torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 63])
    written = torch.stack([one.places(block, position, -1)[0] for one in ranks])
    assert torch.equal(written.max(0).values, block)
    assert (written >= 0).sum() == 6
    assert ranks[3].places(block, position, -1)[1].tolist() == [0, 0, 0, 0, 1, 15]


@pytest.mark.parametrize("size", [2, 4])
def test_longest_row_of_a_rank(size):
    """Kernels divide their work by it."""
    rows = PagedCase((1, 1), (3, 201), block_size=64).inputs()[3]
    for rank in range(size):
        own = RankAlone(rank, size).rows(rows)
        assert int(own.kv_lengths.max()) <= own.max_kv_length <= -(-rows.max_kv_length // size)


@pytest.mark.parametrize("size", [1, 3, 6, 128])
def test_refused_sizes(size):
    with pytest.raises(ValueError, match=f"tensor_parallel_size .* at least 2 .* got {size}"):
        require_shares(size, 64)


def test_ranks_of_a_group():
    ranks = CacheShares(world.tp_group())
    assert (ranks.rank, ranks.size) == (0, 1)


def test_parity_mode_does_not_go_with_shares():
    """Also in a context that no engine has made."""
    context, kv = SimpleNamespace(cache_ranks=object()), torch.zeros(3, 1, 24)
    with pytest.raises(ValueError, match=r"decode_context_parallel=True .*parity mode"):
        parity = AbsorbedMLAOptions(batch_invariant=True)
        DynamicCache().open(context, 1, int, kv, parity, owner=None)
