"""The recall of a selection where the heads of the attention are split over ranks."""

from __future__ import annotations

import torch

from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.testing.indexer_recall import selection_recall
from tests.support import world


def test_the_probability_is_that_of_all_heads():
    """On every rank, as if it had all of them."""
    tokens, topk, heads, width, rope = 24, 3, 4 * world.tp_size(), 6, 2
    generator = torch.Generator().manual_seed(0)
    query, kv = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(world.device())
        for shape in ((tokens, 1, heads, width + rope), (tokens, 1, width + rope))
    )
    chosen = torch.arange(tokens)[:, None, None] - torch.arange(topk - 1, -1, -1)
    chosen = chosen.clamp(min=-1).int().to(world.device())
    spans = Spans(self_attention_spans(SequenceLayout.dense(tokens), causal=True))

    def recall(own: torch.Tensor, group=None):
        inputs = latent_inputs(own[..., :width], own[..., width:], kv)
        return selection_recall(chosen, inputs, spans, 0.5, tp_group=group)

    expected = recall(query)
    found = recall(world.own_part(query, dim=2), world.tp_group())
    assert found == expected and 0 < found.found < found.wanted
