"""The indexer's loss and its gradient against autograd on whole matrices, in float64."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span, Spans, self_attention_spans
from absorbed_mla.core_attention.types import AttentionInputs
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.key_subset import KeySubset, chosen_keys, visible_keys
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.sequences import SequenceLayout
from tests.oracle import probabilities
from tests.oracle_dsa import kl_of_rows
from tests.support import needs, world
from tests.support.memory import PeakMemory
from tests.support.numerics import relative_error
from tests.support.spans import visible
from tests.unit.dsa.test_selection import random_index
from tests.unit.dsa.test_sparse_reference import mask_of, random_selection

pytestmark = pytest.mark.usefixtures("_on_the_device")
BOUND = 1e-12
QUERIES, KEYS, BATCH, HEADS, LATENT, ROPE = 7, 11, 2, 3, 6, 4
SCALE, FACTOR = 0.3, 0.17
# Query 3 is padding; the others see keys of their own sequences, causally or all.
SPANS = Spans([Span(0, 3, 0, 5, 2), Span(4, 7, 6, 11, None)])


@pytest.fixture
def index() -> IndexVectors:
    shapes = (QUERIES, BATCH, 5, 8), (KEYS, BATCH, 8), (QUERIES, BATCH, 5)
    return IndexVectors(*(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes))


@pytest.fixture
def inputs() -> AttentionInputs:
    shapes = (QUERIES, BATCH, HEADS, LATENT), (QUERIES, BATCH, HEADS, ROPE)
    query = (torch.randn(s, dtype=torch.float64) for s in shapes)
    kv = torch.randn(KEYS, BATCH, LATENT + ROPE, dtype=torch.float64)
    return latent_inputs(*query, kv)


def attention_scores(inputs: AttentionInputs) -> Tensor:
    """[B, N, S_q, S_k]."""
    query = torch.cat((inputs.q_content, inputs.q_rope), -1)
    kv = torch.cat((inputs.k_content.squeeze(2), inputs.k_rope), -1)
    return torch.einsum("qbnd,kbd->bnqk", query, kv) * SCALE


def truth(index: IndexVectors, inputs: AttentionInputs, seen: Tensor, relu: bool) -> Tensor:
    """The sum over rows; ``seen`` is [B, S_q, S_k]."""
    scores = attention_scores(inputs)
    products = torch.einsum("qbhd,kbd->bhqk", index.query, index.key)
    products = products.relu() if relu else products
    predicted = torch.einsum("qbh,bhqk->bqk", index.weights, products)
    total = predicted.new_zeros(())
    for b in range(BATCH):
        probs = probabilities(scores[b], seen[b].expand(scores[b].shape))
        total = total + kl_of_rows(probs, predicted[b], seen[b]).sum()
    return FACTOR * total


def lse_of(inputs: AttentionInputs, seen: Tensor) -> Tensor:
    scores = attention_scores(inputs).masked_fill(~seen[:, None], -torch.inf)
    return torch.logsumexp(scores, -1).permute(2, 0, 1)


def loss_of(
    index: IndexVectors,
    inputs: AttentionInputs,
    subsets: Iterable[KeySubset] | None = None,
    lse: Tensor | None = None,
    *,
    factor: float = FACTOR,
    relu: bool = True,
) -> Tensor:
    """Over the visible keys of ``SPANS`` unless others are given."""
    subsets = subsets or visible_keys(SPANS, BATCH, world.device())
    return indexer_loss(
        index, inputs, lse, subsets, attention_scale=SCALE, factor=factor, relu=relu
    )


@pytest.mark.parametrize("elements", [1, 60, 2**24])
@pytest.mark.parametrize("with_lse", [False, True], ids=["lse_again", "lse"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_value_and_gradient(index, inputs, stage, relu, with_lse, elements):
    """Whatever the size of a chunk; queries and keys are different tokens."""
    with torch.no_grad():
        # Products of 0, where a ReLU has no gradient.
        index.query[1, :, 2], index.query[5, 0] = 0.0, 0.0
    if stage == "warm_up":
        seen = visible(SPANS, QUERIES, KEYS).expand(BATCH, -1, -1)
        subsets = visible_keys(SPANS, BATCH, world.device(), elements)
    else:
        chosen = random_selection(4)
        seen = mask_of(chosen, KEYS)
        subsets = chosen_keys(chosen, LATENT + ROPE, elements)
    found = loss_of(index, inputs, subsets, lse_of(inputs, seen) if with_lse else None, relu=relu)
    expected = truth(index, inputs, seen, relu)
    assert relative_error(found, expected) < BOUND
    actual = torch.autograd.grad(2 * found, index)
    wanted = torch.autograd.grad(2 * expected, index)
    for name, a, e in zip(index._fields, actual, wanted, strict=True):
        assert relative_error(a, e) < BOUND, name


def test_the_attention_gets_no_gradient(index, inputs):
    inputs = AttentionInputs(*(x if x is None else x.requires_grad_() for x in inputs))
    loss_of(index, inputs).backward()
    assert all(x is None or x.grad is None for x in inputs)


def test_without_gradients(index, inputs):
    with torch.no_grad():
        alone = loss_of(index, inputs)
    assert not alone.requires_grad
    assert torch.equal(alone, loss_of(index, inputs).detach())


def test_a_perfect_indexer_has_no_loss(inputs):
    """One head whose product is the score of the only head of the attention."""
    one = inputs._replace(q_content=inputs.q_content[:, :, :1], q_rope=inputs.q_rope[:, :, :1])
    query = torch.cat((one.q_content, one.q_rope), -1)
    key = torch.cat((one.k_content.squeeze(2), one.k_rope), -1)
    weights = torch.full((QUERIES, BATCH, 1), SCALE, dtype=torch.float64, requires_grad=True)
    found = loss_of(IndexVectors(query, key, weights), one, factor=1.0, relu=False)
    found.backward()
    assert abs(found.item()) < 1e-12 and weights.grad.abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(index, inputs, dtype):
    """Index vectors in half precision, head weights in fp32, as the indexer makes them."""
    query, key = (x.detach().to(dtype).requires_grad_() for x in index[:2])
    weights = index.weights.detach().float().requires_grad_()
    half = IndexVectors(query, key, weights)
    halves = AttentionInputs(*(x if x is None else x.to(dtype) for x in inputs))
    found = loss_of(half, halves)
    doubles = IndexVectors(*(x.detach().double().requires_grad_() for x in half))
    expected = loss_of(doubles, AttentionInputs(*(x if x is None else x.double() for x in halves)))
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < 1e-5
    grads = torch.autograd.grad(found, half)
    truths = torch.autograd.grad(expected, doubles)
    for own, grad, true in zip(half, grads, truths, strict=True):
        assert grad.dtype == own.dtype
        assert relative_error(grad, true) < 2 * torch.finfo(own.dtype).eps + 1e-5


@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_keys_sum_their_gradients_in_fp32(stage):
    """A key has a part from every chunk of queries; only their sum is rounded to bf16."""
    queries, keys = 400, 4
    shapes = (queries, 1, 2, 8), (keys, 1, 8), (queries, 1, 2)
    query, key, weights = (torch.randn(shape) for shape in shapes)
    half = IndexVectors(query.bfloat16(), key.bfloat16(), weights)
    inputs = latent_inputs(
        *(torch.randn(queries, 1, 2, n) for n in (6, 2)), torch.randn(keys, 1, 8)
    )
    found = []
    for index in (half, IndexVectors(*(x.double() for x in half))):
        index.key.requires_grad_()
        subsets = visible_keys(Spans([Span(0, queries, 0, keys, None)]), 1, world.device(), 1)
        if stage == "sparse":
            every = torch.arange(keys, dtype=torch.int32).expand(queries, 1, keys)
            subsets = chosen_keys(every.contiguous(), 8, 1)
        found += torch.autograd.grad(loss_of(index, inputs, subsets), index.key)
    assert relative_error(*found) < torch.finfo(torch.bfloat16).eps / 2


def test_small_gradients_in_fp16(index, inputs):
    """A mean over many tokens is below the range of fp16 until the loss scale multiplies it."""
    half = IndexVectors(*(x.detach().half().requires_grad_() for x in index[:2]), index.weights)
    scale = 2.0**24
    grads = torch.autograd.grad(scale * loss_of(half, inputs, factor=FACTOR / scale), half)
    truths = torch.autograd.grad(loss_of(half, inputs), half)
    for grad, true in zip(grads, truths, strict=True):
        assert relative_error(grad, true) < 1e-3


@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_memory(stage):
    """Forward and backward hold a few copies of the inputs, and of a chunk of scores."""
    tokens, heads, width, elements = 2048, 4, 16, 2**16
    index = IndexVectors(
        torch.randn(tokens, 1, 2, 8, requires_grad=True),
        torch.randn(tokens, 1, 8, requires_grad=True),
        torch.randn(tokens, 1, 2, requires_grad=True),
    )
    query, kv = torch.randn(tokens, 1, heads, width), torch.randn(tokens, 1, width)
    inputs = latent_inputs(query, query[..., :0], kv)
    if stage == "warm_up":
        subsets = visible_keys(
            self_attention_spans(SequenceLayout.dense(tokens), True), 1, kv.device, elements
        )
    else:
        chosen = torch.arange(tokens, dtype=torch.int32)[:, None, None] - torch.arange(16)
        subsets = chosen_keys(chosen.clamp(min=-1).int(), width, elements)
    with PeakMemory() as memory:
        loss_of(index, inputs, subsets).backward()
    own = sum(x.nbytes for x in (*index, query, kv))
    assert memory.peak < 3 * own + 60 * elements < 2 * tokens * tokens


@needs.gpu
def test_warm_up_of_64k_tokens_fits():
    """One rank of eight at V3.2's widths: [S, S] in fp32 is 16 GiB for each of its 16 heads."""
    tokens = 2**16
    index = random_index(tokens, requires_grad=True)
    query = torch.randn(tokens, 1, 16, 576, dtype=torch.bfloat16)
    kv = torch.randn(tokens, 1, 576, dtype=torch.bfloat16)
    inputs = latent_inputs(query[..., :512], query[..., 512:], kv)
    spans = self_attention_spans(SequenceLayout.dense(tokens), True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = loss_of(index, inputs, visible_keys(spans, 1, kv.device), factor=1 / tokens)
    loss.backward()
    assert torch.isfinite(loss) and all(torch.isfinite(x.grad).all() for x in index)
    # Twice the gradient of the queries (1 GiB each), and the tensors of a chunk.
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**30
