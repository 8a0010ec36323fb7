"""Packs of sequences that share prefixes: what the nodes are, and where each token is."""

import random

import pytest
import torch

from absorbed_mla.prefix_tree import PrefixTree, SharedPrefixParams


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("min_shared", [1, 3])
def test_tokens_found_shared_are_those_of_the_sequences(min_shared, multiple):
    draw = random.Random(7)
    for _ in range(200):
        sequences = [draw.choices((0, 1), k=draw.randint(1, 7)) for _ in range(draw.randint(1, 8))]
        tree, tokens = PrefixTree.from_token_ids(
            sequences, min_shared=min_shared, multiple=multiple, pad_token_id=9
        )
        where = tree.expand()
        found = tokens[where].split(tree.sequence_lengths)
        assert [ids.tolist() for ids in found] == sequences
        positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
        assert tree.position_ids()[where].equal(positions)
        assert len(tokens) == tree.num_tokens and not any(n % multiple for n in tree.padded_lengths)
        assert int((tokens == 9).sum()) == tree.num_tokens - sum(tree.lengths)
        for node, length in enumerate(tree.lengths):
            through = {tuple(s) for s, path in zip(sequences, tree.paths) if node in path}
            assert length >= min_shared or len(through) == 1


def test_sequences_keep_their_order_but_for_the_depth_first_one():
    sequences = [[1, 2, 3], [9, 9], [1, 2, 4, 5], [1, 2], [9, 9]]
    tree, tokens = PrefixTree.from_token_ids(sequences)
    assert tokens.tolist() == [1, 2, 3, 4, 5, 9, 9]
    assert tree == PrefixTree((2, 1, 2, 2), (None, 0, 0, None), (1, 3, 2, 0, 3))
    assert tree.paths == ((0, 1), (3,), (0, 2), (0,), (3,))


def test_megatrons_parameters_have_the_nodes_as_sequences():
    tree = PrefixTree.of_groups([(4, [2, 3]), (5, [])])
    assert tree.parents == (None, 0, 0, None)
    params = tree.packed_seq_params()
    assert isinstance(params, SharedPrefixParams) and params.prefix_tree is tree
    assert params.cu_seqlens_q.tolist() == [0, 4, 6, 9, 14]
    assert params.cu_seqlens_q_padded is None and params.max_seqlen_q == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (((), ()), "at least 1; got 0"),
        (((1, 2), (None,)), "got 2, 1 and 2"),
        (((1, 2), (None, 1)), "depth-first order.*got 1 for node 1"),
        (((1, 2, 3, 4), (None, 0, None, 0)), "depth-first order.*got 0 for node 3"),
        (((1, 2, 3), (None, 0, 0), (1,)), r"ends must be nodes.*\(\[1, 2\]\); got \[1\]"),
        (((1, 2), (None, 0), (1, 2)), "ends must be nodes"),
        (((3,), (None,), None, (2,)), "from 0 to padded_lengths, got 3 and 2 for node 0"),
    ],
)
def test_malformed_trees_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        PrefixTree(*arguments)


@pytest.mark.parametrize("sequences", [[], [[1], []]])
def test_sequences_without_tokens_are_refused(sequences):
    with pytest.raises(ValueError, match="lists of 1 token or more"):
        PrefixTree.from_token_ids(sequences)
