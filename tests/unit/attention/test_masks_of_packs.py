"""A mask beside a pack, as Megatron's trainers pass the causal one: it must not say more."""

import itertools

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
from tests.support.layouts import Layout, packed, tree_layout
from tests.support.refusal import refusal

PACK = packed((3, 0, 5), (4, 2, 6))


def layout_of(pack: Layout) -> SequenceLayout:
    return SequenceLayout.from_host(pack.packed_seq_params(torch.device("cpu")), pack.tokens)


LAYOUT = layout_of(PACK)


def visible(causal: bool = True, pack: Layout = PACK) -> Tensor:
    """Pair by pair, [S, S]."""
    seen = torch.zeros(pack.tokens, pack.tokens, dtype=torch.bool)
    for sequence in pack.sequences:
        for query, key in itertools.product(sequence.rows.tolist(), repeat=2):
            seen[query, key] = key <= query or not causal
    return seen


@pytest.mark.parametrize("rows", [1, 5, 1024])
@pytest.mark.parametrize("causal", [True, False, "tree"])
def test_every_pair(causal, rows, monkeypatch):
    monkeypatch.setattr(redundant, "_ROWS", rows)
    pack = tree_layout("deep_padded", 1) if causal == "tree" else PACK
    layout, causal = layout_of(pack), bool(causal)
    tokens, shown = torch.arange(pack.tokens), visible(causal, pack)
    for query, key in itertools.product(range(pack.tokens), repeat=2):
        mask = torch.zeros(1, 1, pack.tokens, pack.tokens, dtype=torch.bool)
        mask[0, 0, query, key] = True
        assert hides_more(mask, layout, tokens, causal) == shown[query, key]


def test_queries_of_two_ranks():
    """Of context parallelism: a mask has rows of a rank's own queries, and columns of all keys."""
    layout = layout_of(packed((5, 2), (8, 4)))
    ranks = [ContextParallelLayout.of(layout, 2, rank).tokens() for rank in range(2)]
    later = torch.arange(12) > torch.arange(12)[:, None]
    for own in ranks:
        assert not hides_more(later[own][None, None], layout, own, causal=True)
        assert hides_more(later.t()[own][None, None], layout, own, causal=True)
    # One row for all: the last key of the first sequence, which only its last token sees.
    mask = torch.zeros(1, 1, 1, 12, dtype=torch.bool)
    mask[..., 4] = True
    for own in (*ranks, *ranks):
        assert hides_more(mask, layout, own, causal=True) == (4 in own)
    assert (4 in ranks[0]) != (4 in ranks[1])


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
