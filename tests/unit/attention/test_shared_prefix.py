"""What packs with shared prefixes refuse; that they are right: tests/distributed."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla.prefix_tree import PrefixTree
from absorbed_mla.sequences import SequenceLayout, layout_of
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal

TREE = PrefixTree.of_groups([(3, [2, 1])])
PARAMS = TREE.packed_seq_params()


@pytest.mark.parametrize(
    ("mla", "setup", "fields", "said"),
    [
        (TINY, {}, {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        (TINY, {}, {"hidden_dropout": 0.1}, "hidden_dropout=0.1"),
        (replace(TINY, window=3), {}, {}, "a window of 3"),
        (TINY, {"mask_type": AttnMaskType.no_mask}, {}, "needs a causal attn_mask_type"),
    ],
)
def test_refused(mla, setup, fields, said):
    attention = build_attention(mla, Setup(**{"form": "auto", **setup}), **fields)
    x = torch.zeros(6, 1, mla.hidden, dtype=torch.float64, device=world.device())
    with refusal("shared prefixes" if fields else "packed_seq_params.prefix_tree", said):
        attention(x, None, packed_seq_params=TREE.packed_seq_params(x.device))
    if fields:  # nothing is dropped there
        attention.eval()(x, None, packed_seq_params=TREE.packed_seq_params(x.device))


def test_boundaries_of_another_pack_are_refused():
    params = replace(PARAMS, cu_seqlens_q=PARAMS.cu_seqlens_q.clone(), cu_seqlens_kv=None)
    params.cu_seqlens_q[1] = 2
    with refusal("nodes of its prefix_tree, (3, 2, 1) tokens", "got (2, 3, 1)"):
        SequenceLayout.from_host(params, 6)


def test_choices_of_requests_are_not_replayed():
    with refusal("prefix_tree=None to replay"):
        layout_of(PARAMS, [3, 2, 1])


def test_layouts_of_other_trees_differ():
    """Tables are kept by layout: the same lengths say nothing of what continues what."""
    other = PrefixTree((3, 2, 1), (None, 0, 1)).packed_seq_params()
    one, two = (SequenceLayout.from_host(params, 6) for params in (PARAMS, other))
    assert one != two and (one.max_position, two.max_position) == (5, 6)
    assert two.positions(torch.device("cpu")).tolist() == [0, 1, 2, 3, 4, 5]
