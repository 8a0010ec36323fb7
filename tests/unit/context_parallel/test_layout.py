"""The index arithmetic of context parallelism against a gather that is counted out token by token.

No processes: every rank of every size is asked in turn.
"""

import itertools

import pytest
import torch

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.sequences import SequenceLayout
from tests.support.combinations import without
from tests.support.layouts import TREES, Layout, cut_tokens, dense, packed, shared, tree_layout
from tests.support.refusal import refusal
from tests.support.spans import pairs_in

SIZES = (2, 3, 4, 8)


def layouts(cp_size: int) -> dict[str, Layout]:
    """Every padding of one sequence, and packs of several."""
    chunks = 2 * cp_size
    cases = {"dense": dense(3 * chunks, 1), "one_token_per_chunk": dense(chunks, 1)}
    for length in range(2 * chunks + 1):
        cases[f"padded_{length}"] = packed((length,), (2 * chunks,))
    cases["pack"] = packed((chunks, 0, 3 * chunks))
    odd = (1, 0, chunks - 1, 2 * chunks - 3, 3 * chunks)
    cases["padded_pack"] = packed(odd, (chunks, chunks, chunks, 2 * chunks, 3 * chunks))
    return cases


# On a CPU paddings of four ranks and of eight, which have nothing that those of two have not.
PADDED = [f"padded_{length}" for length in range(2, 17)]
CASES = [(cp, name) for cp in SIZES for name in without(layouts(cp), *PADDED * (cp > 3))]
every_case = pytest.mark.parametrize("cp_size, name", CASES)
every_mask = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all_keys"])


def sequences_of(layout: Layout) -> SequenceLayout:
    return SequenceLayout.from_host(layout.packed_seq_params(torch.device("cpu")), layout.tokens)


def ranks_of(cp_size: int, layout: Layout) -> list[ContextParallelLayout]:
    whole = sequences_of(layout)
    return [ContextParallelLayout(whole, cp_size, rank) for rank in range(cp_size)]


def visible_pairs(layout: Layout, causal: bool) -> set[tuple[int, int]]:
    """(query, key) of the whole pack, from the list of its sequences."""
    pairs = set()
    for sequence in layout.sequences:
        rows = sequence.rows.tolist()
        for i, j in itertools.product(range(len(rows)), repeat=2):
            if j <= i or not causal:
                pairs.add((rows[i], rows[j]))
    return pairs


def assert_each_query_once(spans: tuple[Span, ...]) -> None:
    """Backends write a query's result, they do not add to it."""
    queries = [q for span in spans for q in range(span.query_start, span.query_end)]
    assert len(queries) == len(set(queries))


@every_case
def test_tokens_and_positions(cp_size, name):
    layout = layouts(cp_size)[name]
    position = {}
    start = 0
    for slot in layout.slots or layout.lengths or (layout.tokens,):
        position |= {start + i: i for i in range(slot)}
        start += slot
    for rank, part in enumerate(ranks_of(cp_size, layout)):
        expected = cut_tokens(layout, cp_size, rank)
        assert part.num_local_tokens == len(expected)
        assert part.tokens().tolist() == part.tokens(rank).tolist() == expected
        assert part.positions().tolist() == [position[token] for token in expected]


@every_case
def test_gathering_and_putting_back(cp_size, name):
    layout = layouts(cp_size)[name]
    by_rank = [cut_tokens(layout, cp_size, rank) for rank in range(cp_size)]
    everything = torch.tensor([token for tokens in by_rank for token in tokens])
    assert sorted(everything.tolist()) == list(range(layout.tokens))
    for part in ranks_of(cp_size, layout):
        assert torch.equal(part.rank_major(), everything)
        assert everything[part.sequence_order()].tolist() == list(range(layout.tokens))


def gathered(part: ContextParallelLayout, cp_size: int, causal: bool):
    """Spans over the keys of all ranks in their order, and the tokens of those keys."""
    yield part.gathered_spans(causal), range(part.num_local_tokens * cp_size)


def by_rank(part: ContextParallelLayout, cp_size: int, causal: bool):
    """Likewise over the keys of one rank after the other."""
    for key_rank in range(cp_size):
        yield part.block_spans(key_rank, causal), part.tokens(key_rank).tolist()


def assert_every_pair_once(layout, cp_size: int, causal: bool, keys) -> list[int]:
    """Returns how many pairs each rank has."""
    seen, work = [], []
    for part in ranks_of(cp_size, layout):
        queries, before = part.tokens().tolist(), len(seen)
        for spans, key_tokens in keys(part, cp_size, causal):
            for level in (spans, *spans.further):
                assert_each_query_once(level)
                seen += [(queries[query], key_tokens[key]) for query, key in pairs_in(level)]
        work.append(len(seen) - before)
    assert len(seen) == len(set(seen)) and set(seen) == visible_pairs(layout, causal)
    return work


@pytest.mark.parametrize("keys", [gathered, by_rank])
@every_mask
@every_case
def test_what_ranks_see(cp_size, name, causal, keys):
    """All ranks together see every visible pair once."""
    assert_every_pair_once(layouts(cp_size)[name], cp_size, causal, keys)


@pytest.mark.parametrize("window", [1, 2, 3, 9, 99])
@every_case
def test_windows_of_a_ring(cp_size, name, window):
    """Blocks have every pair of a window once, at its distance, and no query without a key."""
    layout, seen = layouts(cp_size)[name], []
    for part in ranks_of(cp_size, layout):
        queries = part.tokens().tolist()
        for key_rank in range(cp_size):
            tokens = part.tokens(key_rank)
            for rows, spans in part.window_blocks(key_rank, window, torch.device("cpu")):
                assert_each_query_once(spans)
                assert len(rows.unique()) == len(rows)
                keys = tokens[rows].tolist()
                for span in spans:
                    distance = queries[span.query_start] - keys[span.key_start]
                    assert span.causal_offset == distance < window
                    assert queries[span.query_end - 1] - keys[span.key_end - 1] < window
                found = [(queries[query], keys[key]) for query, key in pairs_in(spans)]
                seen += [(query, key) for query, key in found if query - key < window]
    assert len(seen) == len(set(seen))
    pairs = visible_pairs(layout, True)
    assert set(seen) == {(query, key) for query, key in pairs if query - key < window}


@every_mask
@every_case
def test_one_span_of_a_sequence(cp_size, name, causal):
    """A block of the ring is one call for every sequence; so is everything without a mask."""
    layout = layouts(cp_size)[name]
    for part in ranks_of(cp_size, layout):
        found = [spans for spans, _ in by_rank(part, cp_size, causal)]
        for spans in found if causal else [*found, part.gathered_spans(False)]:
            assert len(spans) <= len(layout.lengths or (layout.tokens,))


@pytest.mark.parametrize("cp_size", SIZES)
def test_causal_work_is_balanced(cp_size):
    layout = dense(4 * cp_size, 1)
    work = [len(pairs_in(part.gathered_spans(True))) for part in ranks_of(cp_size, layout)]
    assert len(set(work)) == 1


@pytest.mark.parametrize("keys", [gathered, by_rank])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("cp_size", SIZES)
def test_shared_prefixes(cp_size, name, keys):
    """Ranks together see every pair once, and without padding each as many of them."""
    work = assert_every_pair_once(tree_layout(name, 2 * cp_size), cp_size, True, keys)
    assert len(set(work)) == 1 or name == "deep_padded"


@pytest.mark.parametrize("tokens", [2, 6, 9, 4098])
def test_a_sequence_that_does_not_divide(tokens):
    with refusal("over 4 ranks", "2 x 4 = 8", f"the sequence has {tokens} tokens"):
        ContextParallelLayout(SequenceLayout.dense(tokens), 4, 0)


def test_a_shared_prefix_that_does_not_divide():
    with refusal("2 x 4 = 8", "node 2 of prefix_tree has 5 tokens", "padded_lengths"):
        ContextParallelLayout(sequences_of(shared(PrefixTree.of_groups([(8, [8, 5])]))), 4, 0)


def test_a_packed_sequence_that_does_not_divide():
    whole = sequences_of(packed((8, 3), (8, 12)))
    with refusal("2 x 4 = 8", "sequence 1 has 12 tokens", "cu_seqlens_q_padded"):
        ContextParallelLayout(whole, 4, 0)
