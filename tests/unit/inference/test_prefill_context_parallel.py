"""Which new tokens of a step a context-parallel rank has."""

from types import SimpleNamespace

import pytest
import torch

from absorbed_mla.inference import prefill_context_parallel
from absorbed_mla.inference.prefill_context_parallel import TokenShares

TOKENS = 24


def shares_of(rank: int, size: int, pieces: int) -> TokenShares:
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    return TokenShares(group, pieces, TOKENS)


@pytest.mark.parametrize("size, pieces", [(2, 1), (4, 1), (2, 2), (3, 4)])
def test_all_tokens_come_back(size, pieces, monkeypatch):
    """As the decoder's hooks cut them, behind the cut of sequence parallelism."""
    whole = torch.arange(TOKENS)
    of_ranks = []
    for rank in range(size):
        cut = [piece.chunk(size)[rank] for piece in whole.chunk(pieces)]
        of_ranks.append(torch.cat(cut))
        own = shares_of(rank, size, pieces).own
        assert torch.equal(torch.cat([whole[tokens] for tokens in own]), of_ranks[-1])
    monkeypatch.setattr(prefill_context_parallel, "gather", lambda x, group: torch.cat(of_ranks))
    assert torch.equal(shares_of(0, size, pieces).gather(of_ranks[0]), whole)


@pytest.mark.parametrize("size, pieces", [(2, 1), (4, 1), (2, 2), (3, 4)])
@pytest.mark.parametrize("segment", [slice(0, TOKENS), slice(0, 5), slice(5, 17), slice(20, 21)])
def test_runs_within_a_segment(segment, size, pieces):
    whole, found = torch.arange(TOKENS), []
    for rank in range(size):
        shares = shares_of(rank, size, pieces)
        held = torch.cat([whole[tokens] for tokens in shares.own])
        for there, here in shares.within(segment):
            assert torch.equal(whole[segment][there], held[here]) and len(held[here])
            found += held[here].tolist()
    assert sorted(found) == whole[segment].tolist()


@pytest.mark.parametrize(
    ("tokens", "graph", "decodes", "divided"),
    [
        (prefill_context_parallel.LEAST_TOKENS, False, False, True),
        (prefill_context_parallel.LEAST_TOKENS - 8, False, False, False),
        (prefill_context_parallel.LEAST_TOKENS + 2, False, False, False),
        (prefill_context_parallel.LEAST_TOKENS, True, False, False),
        (prefill_context_parallel.LEAST_TOKENS, False, True, False),
    ],
    ids=["divided", "few", "no multiple", "graph", "decodes"],
)
def test_which_steps_are_divided(tokens, graph, decodes, divided):
    """Those that read prompts, of enough tokens; a graph holds what a rank did when captured."""
    context = SimpleNamespace(
        padded_active_token_count=tokens,
        using_cuda_graph_this_step=lambda: graph,
        is_decode_only=lambda: decodes,
    )
    group = SimpleNamespace(size=lambda: 4, rank=lambda: 1)
    shares = prefill_context_parallel._shares(context, group, 2)
    assert (shares is not None) is divided
    if divided:
        assert sum(own.stop - own.start for own in shares.own) == tokens // 4
