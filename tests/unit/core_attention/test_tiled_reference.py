"""The reference of parity mode: a token's bits are its own, whatever its widths and neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.tiled_reference import TILE_KEYS, TiledReferenceBackend
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from tests.support.combinations import thinned
from tests.support.numerics import relative_error

# Rows whose length in bytes is no multiple of 64, and such that are: heads, C, rope.
WIDTHS = [(1, 22, 6), (3, 24, 6), (1, 510, 64), (1, 23, 8), (2, 7, 0), (1, 512, 64), (4, 32, 16)]
TOKENS = 70


def operands(heads: int, c: int, rope: int, dtype: torch.dtype) -> AttentionInputs:
    generator = torch.Generator().manual_seed(heads + c + rope)
    shapes = (heads, c), (heads, rope), (1, c), (rope,)
    values = (torch.randn(TOKENS, 1, *shape, generator=generator) for shape in shapes)
    return AttentionInputs(*(x.to(dtype) for x in values), None)


def causal(tokens: int) -> ScoreRules:
    return ScoreRules(0.3, (Span(0, tokens, 0, tokens, 0),))


def cache_of(given: AttentionInputs) -> torch.Tensor:
    """One block, [1, tokens, C + R]."""
    kv = torch.cat((given.k_content[:, :, 0], given.k_rope), dim=-1)
    return kv.transpose(0, 1).contiguous()


def rows(queries: tuple[int, ...], keys: int) -> Rows:
    """Requests that all have the first ``keys`` tokens of the block."""
    table = torch.zeros(len(queries), 1, dtype=torch.int32)
    return Rows.of(queries, (keys,) * len(queries), table)


def agrees_to_the_bit(heads: int, c: int, rope: int, dtype: torch.dtype, first: int) -> None:
    """A training forward, and the tokens from ``first`` on over a cache of all."""
    given = operands(heads, c, rope, dtype)
    out, lse = TiledReferenceBackend().forward(given, causal(TOKENS))
    query = given.q_content[first:, 0], given.q_rope[first:, 0]
    found, found_lse = paged_reference(
        *query, cache_of(given), rows((TOKENS - first,), TOKENS), 0.3
    )
    assert torch.equal(out[first:, 0].to(dtype), found)
    assert torch.equal(lse[first:, 0], found_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_way_to_cut_a_sequence(widths, dtype):
    """Prefill of a suffix of any length: each token stands at another index."""
    for first in (1, 33, TOKENS - 1) if thinned() else (0, 1, 2, 33, TOKENS - 1):
        agrees_to_the_bit(*widths, dtype, first)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("widths", [(5, 23, 8), (7, 40, 8)], ids=str)
def test_threads_do_not_share_the_products_of_one_token(two_threads, widths):
    """Decode has one token: each thread would take some of its heads, by another kernel."""
    given = operands(*widths, torch.float32)
    out, _ = TiledReferenceBackend().forward(given, causal(TOKENS))
    for last in range(1, TOKENS, 3):
        part = AttentionInputs(*(x if x is None else x[:last] for x in given))
        query = part.q_content[-1:, 0], part.q_rope[-1:, 0]
        found, _ = paged_reference(*query, cache_of(part), rows((1,), last), 0.3)
        assert torch.equal(out[last - 1 : last, 0], found)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 5),
    c=st.integers(1, 80),
    rope=st.integers(0, 9).map(lambda half: 2 * half),
    first=st.integers(1, TOKENS - 1),
)
def test_any_widths(heads, c, rope, first):
    agrees_to_the_bit(heads, c, rope, torch.float32, first)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_same_token_gets_the_same_bits(widths):
    """256 of one token: its bits must not depend on its index."""
    given = operands(*widths, torch.float32)
    query = (x[-1].expand(256, -1, -1).contiguous() for x in (given.q_content, given.q_rope))
    out, _ = paged_reference(*query, cache_of(given), rows((1,) * 256, TOKENS), 0.3)
    assert torch.equal(out, out[:1].expand_as(out))


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_padding_changes_no_value(widths):
    given = operands(*widths, torch.float64)
    out, lse = TiledReferenceBackend().forward(given, causal(TOKENS))
    scores = torch.einsum("qbnd,kbd->bnqk", given.q_content, given.k_content[:, :, 0])
    scores = (scores + torch.einsum("qbnr,kbr->bnqk", given.q_rope, given.k_rope)) * 0.3
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    expected = torch.einsum("bnqk,kbd->qbnd", scores.softmax(-1), given.k_content[:, :, 0])
    assert relative_error(out, expected) < 1e-14
    assert relative_error(lse, scores.logsumexp(-1).permute(2, 0, 1)) < 1e-14
    assert TOKENS > TILE_KEYS, "more than one tile"
