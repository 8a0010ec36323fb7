"""Attention over chosen keys against a dense softmax with a mask, in float64."""

import pytest
import torch
from torch import Tensor

from absorbed_mla.dsa import key_subset, sparse_reference
from absorbed_mla.dsa.backends.reference import ENTRY as REFERENCE
from absorbed_mla.dsa.tiled_sparse import tiled_sparse_forward
from tests.oracle import probabilities
from tests.support import needs
from tests.support.dsa import sparse_attention
from tests.support.numerics import relative_error

pytestmark = pytest.mark.usefixtures("_on_the_device")
BOUND = 1e-12
QUERIES, KEYS, BATCH, HEADS, LATENT, ROPE = 7, 11, 2, 3, 6, 4
SCALE = 0.3


def random_selection(topk: int) -> Tensor:
    """Ascending keys, fewer than ``topk`` for some queries, none for the last."""
    chosen = torch.full((QUERIES, BATCH, topk), -1, dtype=torch.int32)
    for q in range(QUERIES - 1):
        for b in range(BATCH):
            keys = torch.randperm(KEYS)[: min(topk, 1 + q + b)].sort().values
            chosen[q, b, : len(keys)] = keys
    return chosen


def mask_of(chosen: Tensor, keys: int) -> Tensor:
    """Bool [B, Q, keys]."""
    seen = torch.zeros(chosen.shape[1], chosen.shape[0], keys, dtype=torch.bool)
    for q, b, place in (chosen >= 0).nonzero().tolist():
        seen[b, q, chosen[q, b, place]] = True
    return seen


def dense(q_content, q_rope, kv, chosen):
    """Output and LSE from whole scores [B, N, S_q, S_k], by autograd."""
    scores = torch.einsum("qbnd,kbd->bnqk", torch.cat((q_content, q_rope), -1), kv) * SCALE
    seen = mask_of(chosen, len(kv))[:, None].expand(scores.shape)
    out = torch.einsum("bnqk,kbc->qbnc", probabilities(scores, seen), kv[..., :LATENT])
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1).permute(2, 0, 1)
    return out, lse


@pytest.fixture(params=[ROPE, 0], ids=["rope", "no_rope"])
def inputs(request) -> list[Tensor]:
    query, rope = (QUERIES, BATCH, HEADS), request.param
    shapes = (*query, LATENT), (*query, rope), (KEYS, BATCH, LATENT + rope)
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("elements", [1, 500, 2**24])
@pytest.mark.parametrize("topk", [1, 4, 16])
@pytest.mark.parametrize("with_lse", [False, True])
def test_against_a_mask(inputs, topk, elements, with_lse, monkeypatch):
    """Output, LSE and all gradients, whatever the size of a chunk; queries are other tokens."""

    def chosen_keys(indices, width):
        return key_subset.chosen_keys(indices, width, elements)

    monkeypatch.setattr(sparse_reference, "chosen_keys", chosen_keys)
    chosen = random_selection(topk)
    found = sparse_attention(*inputs, chosen, SCALE)
    truth = dense(*inputs, chosen)
    assert relative_error(found.out, truth[0]) < BOUND
    blind = truth[1] == -torch.inf
    assert torch.equal(found.lse == -torch.inf, blind) and blind.any()
    assert relative_error(found.lse[~blind], truth[1][~blind]) < BOUND

    directions = torch.randn_like(truth[0]), torch.randn_like(truth[1])

    def scalar(out, lse):
        total = (out * directions[0]).sum()
        return total + (lse * directions[1])[~blind].sum() if with_lse else total

    actual = torch.autograd.grad(scalar(*found), inputs)
    expected = torch.autograd.grad(scalar(*truth), inputs)
    for name, a, e in zip(("q_content", "q_rope", "kv"), actual, expected, strict=True):
        assert relative_error(a, e) < BOUND, name


def test_half_precision(inputs):
    """Outputs and gradients in bf16, computed in fp32."""
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    chosen = random_selection(4)
    found = sparse_attention(*halves, chosen, SCALE)
    assert found.out.dtype == torch.bfloat16 and found.lse.dtype == torch.float32
    truth = dense(*(x.double() for x in halves), chosen)
    assert relative_error(found.out, truth[0]) < 2**-8
    grads = torch.autograd.grad(found.out.float().sum(), halves)
    assert all(g.dtype == torch.bfloat16 for g in grads)


def test_no_second_derivative(inputs):
    found = sparse_attention(*inputs, random_selection(4), SCALE)
    [grad] = torch.autograd.grad(found.out.sum(), inputs[2:], create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


def test_keys_in_two_parts(inputs):
    """Parts of the keys with the LSE over all give the parts of the gradients (ring exchange)."""
    whole = [x.detach() for x in inputs]
    chosen = random_selection(6)
    kv = whole[2]
    latent = sparse_reference.latent_inputs(*whole)
    output = sparse_reference.sparse_forward(latent, chosen, SCALE)
    grad = sparse_reference.OutputGradient(torch.randn_like(output.out), None)
    truth = sparse_reference.sparse_backward(grad, output, latent, chosen, SCALE)
    cut = 5
    total = torch.zeros_like(truth.q_content)
    for first, last in ((0, cut), (cut, KEYS)):
        inside = (chosen >= first) & (chosen < last)
        part = torch.where(inside, chosen - first, -1)
        inputs_of_part = sparse_reference.latent_inputs(*whole[:2], kv[first:last])
        found = sparse_reference.sparse_backward(grad, output, inputs_of_part, part, SCALE)
        assert relative_error(found.k_content, truth.k_content[first:last]) < BOUND
        total += found.q_content
    assert relative_error(total, truth.q_content) < BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [5, 64, 100])
class TestParity:
    """Attention of parity mode."""

    def inputs(self, dtype):
        widths = (300, 1, 3, LATENT), (300, 1, 3, ROPE), (300, 1, LATENT + ROPE)
        return [torch.randn(s, dtype=torch.float64).to(dtype) for s in widths]

    def selection(self, topk):
        """Of 300 queries, more than a chunk; some see fewer keys than ``topk``."""
        best = torch.rand(300, 300).tril().topk(topk).indices.sort().values
        best = best.masked_fill(best > torch.arange(300)[:, None], 300).sort().values
        return best.masked_fill(best == 300, -1).int()[:, None]

    def test_numbers(self, topk, dtype):
        """Also with its own gradient, which is the reference's."""
        tensors = [x.requires_grad_() for x in self.inputs(dtype)]
        chosen = self.selection(topk)
        found = sparse_attention(*tensors, chosen, SCALE, REFERENCE.invariant)
        truth = sparse_attention(*tensors, chosen, SCALE)
        bound = 4 * torch.finfo(dtype).eps
        assert relative_error(found.out, truth.out) < bound
        assert relative_error(found.lse, truth.lse) < 1e-6
        grads, truths = (torch.autograd.grad(x.out.sum(), tensors) for x in (found, truth))
        for grad, true in zip(grads, truths, strict=True):
            assert relative_error(grad, true) < max(bound, 1e-5)

    @needs.no_gpu  # where products in PyTorch have no fixed order
    def test_bits(self, topk, dtype):
        """A decode over a cache in other blocks of memory, with a wider selection."""
        q_content, q_rope, kv = self.inputs(dtype)
        chosen = self.selection(topk)
        inputs = sparse_reference.latent_inputs(q_content, q_rope, kv)
        whole = tiled_sparse_forward(inputs, chosen, SCALE)
        moved = torch.randperm(300)
        cache = torch.empty_like(kv)
        cache[moved] = kv
        for token in (0, 7, 255, 299):
            places = torch.where(chosen[token] >= 0, moved[chosen[token].long()], -1)
            places = torch.nn.functional.pad(places, (0, 70), value=-1).int()[None]
            one = slice(token, token + 1)
            given = sparse_reference.latent_inputs(q_content[one], q_rope[one], cache)
            found = tiled_sparse_forward(given, places, SCALE)
            assert torch.equal(found.out[0], whole.out[token])
            assert torch.equal(found.lse[0], whole.lse[token])
