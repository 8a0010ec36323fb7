"""The recall of a selection, against sets of keys counted by hand and by sorting every row."""

import math

import pytest
import torch
from torch import Tensor

from absorbed_mla import SamplingParams
from absorbed_mla.core_attention.masks.spans import Spans, self_attention_spans
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.sequences import SequenceLayout
from absorbed_mla.testing.indexer_recall import Recall, measure_recall, selection_recall
from tests.support.dsa_models import DSA, dsa_model, generating_fields
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.models import call, gpt_model
from tests.support.refusal import refusal

on_the_device = pytest.mark.usefixtures("_on_the_device")


def spans_of(layout: SequenceLayout) -> Spans:
    return Spans(self_attention_spans(layout, causal=True))


@on_the_device
def test_by_hand():
    """Two queries with a choice of two keys; one finds both, one finds one."""
    # One head, a latent of one channel, no RoPE part that counts: the score of a key is its value.
    kv = torch.tensor([3.0, 1.0, 2.0, 5.0, 0.0])[:, None, None]
    kv = torch.cat((kv, torch.zeros(5, 1, 1)), dim=-1)
    query = torch.ones(5, 1, 1, 1), torch.zeros(5, 1, 1, 1)
    # Best of those seen: queries 0 and 1 have no choice, 2: {0, 2}, 3: {0, 3}, 4: {0, 3}.
    chosen = torch.tensor([[0, -1], [0, 1], [0, 2], [1, 3], [2, 4]], dtype=torch.int32)[:, None]
    spans = spans_of(SequenceLayout.dense(5))
    recall = selection_recall(chosen, latent_inputs(*query, kv), spans, 1.0)
    assert (recall.wanted, recall.found) == (6, 2 + 1 + 0)
    assert recall.share == 0.5
    # A random pair has a key of the two best with probability 2 / n.
    assert recall.by_chance == pytest.approx(2 * (2 / 3 + 2 / 4 + 2 / 5))


def sorted_recall(chosen: Tensor, q: Tensor, kv: Tensor, layout: SequenceLayout, scale: float):
    """Found and wanted, one query at a time."""
    found = wanted = 0
    topk = chosen.shape[-1]
    for start, length in zip(layout.starts, layout.lengths):
        for token in range(length):
            for entry in range(q.shape[1]):
                scores = q[start + token, entry] @ kv[start : start + token + 1, entry].T * scale
                mass = scores.softmax(-1).sum(0)
                if len(mass) > topk:
                    best = (start + mass.argsort(descending=True)[:topk]).tolist()
                    wanted += topk
                    found += len(set(best) & set(chosen[start + token, entry].tolist()))
    return found, wanted


@on_the_device
@pytest.mark.parametrize("elements", [1, 2**24])
@pytest.mark.parametrize(
    ("layout", "batch"),
    [(SequenceLayout.dense(17), 2), (SequenceLayout.pack((5, 1, 0, 13)), 1)],
    ids=["sbhd", "thd"],
)
def test_against_sorting(layout, batch, elements):
    torch.manual_seed(0)
    tokens, topk, heads, width, rope = layout.num_tokens, 3, 4, 6, 2
    q = torch.randn(tokens, batch, heads, width + rope, dtype=torch.float64)
    kv = torch.randn(tokens, batch, width + rope, dtype=torch.float64)
    chosen = torch.full((tokens, batch, topk), -1, dtype=torch.int32)
    for start, length in zip(layout.starts, layout.lengths):
        for token in range(length):
            for entry in range(batch):
                some = torch.randperm(token + 1)[:topk].sort().values + start
                chosen[start + token, entry, : len(some)] = some
    inputs = latent_inputs(q[..., :width], q[..., width:], kv)
    recall = selection_recall(chosen, inputs, spans_of(layout), 0.5, elements=elements)
    assert (recall.found, recall.wanted) == sorted_recall(chosen, q, kv, layout, 0.5)
    assert 0 < recall.found < recall.wanted


def test_no_choice():
    assert math.isnan(Recall().share)


class TestModel:
    @pytest.fixture(scope="class")
    def model(self):
        return dsa_model(num_layers=2).eval()

    def test_layers(self, model):
        """Twice the same forward counts twice; the model computes as before."""
        with torch.no_grad():
            before = call(model)
            with measure_recall(model) as once:
                inside = call(model)
            with measure_recall(model) as twice:
                call(model), call(model)
            after = call(model)
        assert torch.equal(before, inside) and torch.equal(before, after)
        assert len(once) == 2
        for name, recall in once.items():
            assert name.endswith("self_attention.core_attention")
            assert 0 < recall.found < recall.wanted
            assert twice[name] == recall + recall

    def test_over_all_keys(self, model):
        """The attention is that of a top-k above the sequence, and the indexers choose."""
        dense = dsa_model(num_layers=2, dsa_indexer_topk=DSA.topk + 1000).eval()
        with torch.no_grad():
            sparse = call(model)
        with torch.no_grad(), measure_recall(model, attend_to_all=True) as recall:
            found = call(model)
            assert torch.equal(found, call(dense))
            assert not torch.equal(found, sparse)
        assert all(one.wanted for one in recall.values())

    def test_while_generating(self):
        """A step has the queries of a few tokens; afterwards the engine goes on."""
        sampling = SamplingParams(max_tokens=3, temperature=0)
        model = generating_model(**generating_fields())
        engine, untouched = engine_of(model, max_requests=2), engine_of(model, max_requests=2)
        with refusal("measure_recall", "inference_context"), measure_recall(model):
            engine.generate([prompt(7, 1)], sampling)
        found, expected = (e.generate([prompt(7, 1)], sampling) for e in (engine, untouched))
        assert found == expected and len(found[0].tokens) == 3

    def test_a_dense_model(self):
        refused = pytest.raises(ValueError, match="no layer with an indexer")
        with refused, measure_recall(gpt_model(num_layers=1)):
            pass
