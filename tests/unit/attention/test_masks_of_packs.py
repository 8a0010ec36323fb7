"""A mask beside a pack, as Megatron's trainers pass the causal one: it must not say more."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.masks import redundant
from absorbed_mla.core_attention.masks.redundant import hides_more
from absorbed_mla.sequences import SequenceLayout
from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.layouts import packed
from tests.support.refusal import refusal

LENGTHS, SLOTS = (3, 0, 5), (4, 2, 6)
PACK = packed(LENGTHS, SLOTS)
LAYOUT = SequenceLayout.from_host(PACK.packed_seq_params(torch.device("cpu")), PACK.tokens)


def visible(causal: bool = True) -> Tensor:
    """Pair by pair, [S, S]."""
    seen = torch.zeros(PACK.tokens, PACK.tokens, dtype=torch.bool)
    start = 0
    for length, slot in zip(LENGTHS, SLOTS):
        for query in range(length):
            for key in range(length):
                seen[start + query, start + key] = key <= query or not causal
        start += slot
    return seen


def every_pair(causal: bool) -> list[tuple[Tensor, bool]]:
    """Masks that hide one pair, and whether it was seen."""
    masks = []
    for query in range(PACK.tokens):
        for key in range(PACK.tokens):
            mask = torch.zeros(1, 1, PACK.tokens, PACK.tokens, dtype=torch.bool)
            mask[0, 0, query, key] = True
            masks.append((mask, bool(visible(causal)[query, key])))
    return masks


@pytest.mark.parametrize("rows", [1, 5, 1024])
@pytest.mark.parametrize("causal", [True, False])
def test_every_pair(causal, rows, monkeypatch):
    monkeypatch.setattr(redundant, "_ROWS", rows)
    tokens = torch.arange(PACK.tokens)
    for mask, seen in every_pair(causal):
        assert hides_more(mask, LAYOUT, tokens, causal) == seen


@pytest.mark.parametrize("rank", [0, 1])
def test_queries_of_a_rank(rank):
    """Of context parallelism: it has rows of its own queries, and columns of all keys."""
    pack = packed((5, 2), (8, 4))
    layout = SequenceLayout.from_host(pack.packed_seq_params(torch.device("cpu")), pack.tokens)
    own = ContextParallelLayout.of(layout, 2, rank).tokens()
    later = torch.arange(12) > torch.arange(12)[:, None]
    assert not hides_more(later[own][None, None], layout, own, causal=True)
    earlier = later.t().clone()
    assert hides_more(earlier[own][None, None], layout, own, causal=True)


def test_one_mask_for_the_queries_of_two_ranks():
    """A mask has one row for them, or the ranks have equally many."""
    pack = packed((5, 2), (8, 4))
    layout = SequenceLayout.from_host(pack.packed_seq_params(torch.device("cpu")), pack.tokens)
    first, second = (ContextParallelLayout.of(layout, 2, rank).tokens() for rank in range(2))
    # The last key of the first sequence, which only its last token sees.
    mask = torch.zeros(1, 1, 1, 12, dtype=torch.bool)
    mask[..., 4] = True
    seen = [4 in tokens for tokens in (first, second)]
    assert sorted(seen) == [False, True]
    for _ in range(2):
        for tokens, expected in zip((first, second), seen):
            assert hides_more(mask, layout, tokens, causal=True) == expected


def test_one_row_for_all_queries():
    padding = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1], dtype=torch.bool)
    tokens = torch.arange(PACK.tokens)
    assert not hides_more(padding[None, None, None], LAYOUT, tokens, causal=True)
    padding[2] = True
    assert hides_more(padding[None, None, None], LAYOUT, tokens, causal=True)


def test_it_is_compared_once(monkeypatch):
    """All layers get the same mask, and reading the answer waits for a GPU."""
    compared = []
    original = redundant._compare
    monkeypatch.setattr(redundant, "_compare", lambda *a: compared.append(a) or original(*a))
    mask, tokens = ~visible()[None, None], torch.arange(PACK.tokens)
    for _ in range(3):
        assert not hides_more(mask, LAYOUT, tokens, causal=True)
    assert len(compared) == 1
    assert hides_more(mask, LAYOUT, tokens, causal=False)
    mask[0, 0, 1, 0] = True
    assert hides_more(mask, LAYOUT, tokens, causal=True) and len(compared) == 3
    with torch.inference_mode():
        assert hides_more(mask.clone(), LAYOUT, tokens, causal=True)


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.padding])
def test_the_attention_computes_as_without(mask_type):
    attention = build_attention(TINY, Setup(mask_type=mask_type))
    device, causal = world.device(), mask_type is AttnMaskType.causal
    x = PACK.random_rows(TINY.hidden, 1).to(device)
    arguments = {"packed_seq_params": PACK.packed_seq_params(device)}
    expected, _ = attention(x, None, **arguments)
    hidden = ~visible(causal)[None, None].to(device)
    for mask in (hidden, torch.zeros_like(hidden)):
        found, _ = attention(x, mask, **arguments)
        assert found.equal(expected)
    hidden[0, 0, 6, 6] = True
    with refusal("attention_mask must be None", "packed_seq_params", "(1, 1, 12, 12)"):
        attention(x, hidden, **arguments)


@needs.gpu
def test_not_while_a_graph_is_captured():
    mask = torch.zeros(1, 1, 12, 12, dtype=torch.bool, device="cuda")
    tokens = torch.arange(12, device="cuda")
    with refusal("CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        hides_more(mask, LAYOUT, tokens, causal=True)
