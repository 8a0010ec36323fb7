"""The kernels in parity mode: what they give a token does not depend on other tokens.

Whole models: tests/unit/serving/test_sparse.py, on a GPU with these kernels.
"""

from dataclasses import replace

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.backend import choose_implementation
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import visible_keys
from absorbed_mla.dsa.scores import index_scores
from absorbed_mla.inference.rows import Rows
from absorbed_mla.registry import INDEXER_BACKENDS, SPARSE_BACKENDS
from tests.oracle_dsa import OracleDSA
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.cases import INTERPRETED
from tests.support.dsa import dsa_fields
from tests.support.parity import cached, parity_model, tokens_of, trained
from tests.unit.dsa.test_kernel_backends import ON_DEVICE

pytest.importorskip("triton")

with triton_interpreter():
    from absorbed_mla.dsa.batch_invariant_indexer import invariant_scores
    from absorbed_mla.kernels import operators
    from absorbed_mla.kernels.dsa import cached_scores, forward  # noqa: F401

DEVICE = ON_DEVICE.device
TOKENS, BATCH, HEADS, WIDTH, TOPK = 37, 2, 3, 16, 24
PARITY = replace(ON_DEVICE, batch_invariant=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks and tiles of which the tests have several."""
    monkeypatch.setattr(cached_scores, "_TOKENS", 4)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cached_scores, "_KEYS", 16)
    with triton_interpreter():
        yield


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)


def vectors() -> IndexVectors:
    weights = random(TOKENS, BATCH, HEADS).float()
    return IndexVectors(random(TOKENS, BATCH, HEADS, WIDTH), random(TOKENS, BATCH, WIDTH), weights)


@pytest.mark.parametrize("registry", [SPARSE_BACKENDS, INDEXER_BACKENDS])
def test_what_is_chosen(registry):
    found = choose_implementation(registry, "triton", PARITY)
    assert found is registry["triton"].invariant


def test_fp8_is_refused():
    with pytest.raises(ValueError, match="triton_fp8: it is not batch-invariant"):
        choose_implementation(INDEXER_BACKENDS, "triton_fp8", replace(PARITY, index_dim=128))


def test_scores_are_those_of_generation():
    """A chunk of two sequences of a pack, and the same tokens as two requests of a cache."""
    index, lengths = vectors(), (21, 16)
    spans = Spans([Span(0, 21, 0, 21, 0), Span(21, 16, 21, 16, 0)])
    chunks = [*visible_keys(spans, BATCH, DEVICE, queries=8)]
    rows = Rows.of(lengths, lengths, torch.tensor([[0, 1, 2], [3, 4, 5]], device=DEVICE).int())
    places = cached_scores.locate(
        rows.query_starts, rows.query_lengths, rows.kv_lengths, 21, TOKENS
    )
    for entry in range(BATCH):
        cache = index.key.new_full((6, 8, WIDTH), torch.nan)
        for row, (start, length) in enumerate(((0, 21), (21, 16))):
            cache[3 * row : 3 * row + 3].flatten(0, 1)[:length] = index.key[
                start : start + length, entry
            ]
        cached = cached_scores.cached_scores(
            index.query[:, entry],
            index.weights[:, entry],
            cache,
            rows.block_table,
            places,
            slice(0, TOKENS),
            21,
            True,
            tiles=True,
        )
        for keys in chunks:
            found = invariant_scores(index, keys, True)[entry]
            expected = index_scores(index, keys, True)[entry]
            width = keys.span.num_keys
            own = cached[keys.queries, :width]
            assert torch.equal(found[keys.seen], own[keys.seen])
            torch.testing.assert_close(found[keys.seen], expected[keys.seen], rtol=1e-5, atol=1e-4)


def test_attention_of_a_token_alone():
    """Among others, and alone with its keys at other places, as in a cache."""
    generator = torch.Generator().manual_seed(0)
    heads, width, rope, keys = 3, 32, 16, 80
    query = random(TOKENS, 1, heads, width), random(TOKENS, 1, heads, rope)
    latent = random(keys, 1, width), random(keys, 1, rope)
    chosen = torch.stack(
        [torch.randperm(keys, generator=generator)[:TOPK].sort().values for _ in range(TOKENS)]
    )
    chosen[3, 10:] = -1
    chosen = chosen.int().unsqueeze(1).to(DEVICE)
    attend = operators.sparse_attention_forward
    found = attend(*query, *latent, chosen, 0.1, "invariant")
    expected = attend(*query, *latent, chosen, 0.1, "triton")
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    order = torch.randperm(keys, generator=generator).to(DEVICE)
    moved = [torch.empty_like(x).index_copy_(0, order, x) for x in latent]
    for token in (3, 20):
        own = chosen[token : token + 1]
        slots = torch.where(own < 0, own, order[own.clamp(min=0).long()].int())
        own_query = (x[token : token + 1] for x in query)
        alone = attend(*own_query, *moved, slots, 0.1, "invariant")
        assert torch.equal(alone[0][0], found[0][token])
        assert torch.equal(alone[1][0], found[1][token])


@pytest.mark.no_cover
@pytest.mark.skipif(needs.HAS_GPU, reason="test_sparse.py has larger ones on a GPU")
def test_training_and_generation_of_a_model():
    """Texts shorter than top-k, too: the dense attention of other kernels has other bits."""
    dsa = OracleDSA(mla=INTERPRETED, heads=2, width=16, topk=8)
    options = {"sparse_attention_backend": "triton", "indexer_backend": "triton"}
    fields = {**dsa_fields(dsa), "num_layers": 1}
    with batch_invariant_mode():
        model = parity_model(torch.float32, mla=dsa.mla, options=options, **fields)
        tokens = tokens_of(batch=1, count=14)
        expected = trained(model, tokens)
        assert torch.equal(trained(model, tokens[:, :6]), expected[:, :6])
        for sizes in ([14], [5, 9], [11, 1, 1, 1]):
            assert torch.equal(cached(model, tokens, sizes), expected), sizes
