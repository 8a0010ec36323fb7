"""Selection and warm-up loss on a GPU, at the widths of DeepSeek-V3.2."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, self_attention_spans
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.key_subset import VisibleKeys, visible_keys
from absorbed_mla.dsa.selection import best_keys, select
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.dsa.types import IndexVectors
from absorbed_mla.sequences import SequenceLayout
from tests.support import needs, world

pytestmark = needs.gpu
GIB = 2**30


def random_index(tokens: int, requires_grad: bool = False) -> IndexVectors:
    """64 heads of 128 in bf16, head weights in fp32."""
    like = {"device": world.device(), "dtype": torch.bfloat16}
    query, key = torch.randn(tokens, 1, 64, 128, **like), torch.randn(tokens, 1, 128, **like)
    weights = torch.randn(tokens, 1, 64, device=world.device()) * 8192**-0.5
    return IndexVectors(*(x.requires_grad_(requires_grad) for x in (query, key, weights)))


@pytest.mark.parametrize("levels", [5, 10**6], ids=["ties", "distinct"])
def test_selects_what_a_cpu_does(levels):
    """A fixed table of scores, with thousands of ties at the threshold or almost none."""
    queries, keys, topk = 64, 16384, 2048
    scores = torch.randint(levels, (1, queries, keys)).float() - levels // 2
    span = Span(0, queries, 0, keys, keys - queries)
    expected = best_keys(scores, VisibleKeys(span, torch.device("cpu"), 1), topk)
    on_device = scores.to(world.device())
    for _ in range(3):
        found = best_keys(on_device, VisibleKeys(span, world.device(), 1), topk)
        assert torch.equal(found.cpu(), expected)


def test_selection_repeats():
    index = random_index(6144)
    spans = self_attention_spans(SequenceLayout.dense(6144), True)
    first = select(index, spans, 2048, relu=True)
    assert torch.equal(select(index, spans, 2048, relu=True), first)
    assert first.shape == (6144, 1, 2048) and int((first[-1] >= 0).sum()) == 2048


def test_warm_up_of_64k_tokens_fits():
    """One rank of eight, 16 heads: [S, S] in fp32 would be 16 GiB for each of them."""
    tokens, heads = 2**16, 16
    index = random_index(tokens, requires_grad=True)
    like = {"device": world.device(), "dtype": torch.bfloat16}
    query = torch.randn(tokens, 1, heads, 576, **like)
    inputs = latent_inputs(query[..., :512], query[..., 512:], torch.randn(tokens, 1, 576, **like))
    spans = self_attention_spans(SequenceLayout.dense(tokens), True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = indexer_loss(
        index,
        inputs,
        None,
        visible_keys(spans, 1, world.device()),
        attention_scale=0.1,
        factor=1 / tokens,
        relu=True,
    )
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(x.grad).all() for x in index)
    # Twice the gradient of the queries (1 GiB each), and the tensors of a chunk.
    assert torch.cuda.max_memory_allocated() - before < 4 * GIB
