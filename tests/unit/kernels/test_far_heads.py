"""Heads 2^30 numbers apart, as absorbed queries of long sequences lie: products pass 2^31.

The memory between them is never touched, so it costs nothing.
"""

import pytest
import torch
from torch import Tensor

from absorbed_mla.kernels.latent_backward import LatentBackward
from tests.support.backends import triton_interpreter
from tests.support.numerics import random

pytest.importorskip("triton")
pytestmark = pytest.mark.no_cover
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUERIES, KEYS, HEADS, WIDTH, ROPE = 4, 40, 3, 32, 16
SCALE = 0.2

with triton_interpreter():
    from absorbed_mla.kernels import operators
    from absorbed_mla.kernels.dsa import forward  # noqa: F401
    from absorbed_mla.kernels.dsa.backward import backward as sparse_backward
    from absorbed_mla.kernels.dsa.index_chosen import chosen_scores
    from absorbed_mla.kernels.dsa.index_gradient import add_visible_gradient
    from absorbed_mla.kernels.dsa.index_scores import index_scores
    from absorbed_mla.kernels.dsa.kl_target import chosen_target, visible_target


def far(x: Tensor) -> Tensor:
    """The same values [S, B, N, W] with heads far apart."""
    tokens, batch, heads, width = x.shape
    apart = 2**30
    numbers = (heads - 1) * apart + tokens * batch * width
    # Not torch.empty, which fills memory where algorithms are to be deterministic.
    memory = torch.UntypedStorage(numbers * x.element_size(), device=DEVICE)
    found = torch.empty(0, dtype=x.dtype, device=DEVICE)
    found.set_(memory, 0, x.shape, (batch * width, width, apart, 1))
    return found.copy_(x)


def chosen_keys() -> Tensor:
    return torch.arange(20, dtype=torch.int32, device=DEVICE).expand(QUERIES, 1, -1).contiguous()


def operands(move) -> list[Tensor]:
    queries = [move(random(QUERIES, 1, HEADS, w).bfloat16()) for w in (WIDTH, ROPE)]
    return [*queries, *(random(KEYS, 1, w).bfloat16() for w in (WIDTH, ROPE))]


def visible(move):
    lse = random(QUERIES, 1, HEADS) + 3
    return visible_target(operands(move), lse, slice(1, 4), 2, 30, 25, SCALE)


def chosen(move):
    return chosen_target(operands(move), random(QUERIES, 1, HEADS) + 3, chosen_keys(), SCALE)


def sparse_forward(move):
    return operators.sparse_attention_forward(*operands(move), chosen_keys(), SCALE, "triton")


def attention(move):
    return torch.cat([x.float().flatten() for x in sparse_forward(move)])


def attention_gradient(move):
    out, lse = sparse_forward(torch.clone)
    grad = move(random(QUERIES, 1, HEADS, WIDTH).bfloat16())
    call = LatentBackward(grad, None, move(out), lse, *operands(move), SCALE)
    found = sparse_backward(call, chosen_keys(), deterministic=True)
    return torch.cat([x.float().flatten() for x in found])


def index(move):
    query = move(random(QUERIES, 1, HEADS, WIDTH).bfloat16())
    return query, random(KEYS, 1, WIDTH).bfloat16(), random(QUERIES, 1, HEADS)


def scores(move):
    return index_scores(*index(move), slice(0, QUERIES), 0, KEYS, None, True)


def scores_of_chosen(move):
    return chosen_scores(*index(move), chosen_keys(), True)


def index_gradient(move):
    query, key, weights = index(move)
    found = torch.zeros_like(query.contiguous()), torch.zeros_like(key.float()), weights.clone()
    grad = random(1, QUERIES, KEYS)
    add_visible_gradient(found, grad, query, key, weights, None, True)
    return torch.cat([x.float().flatten() for x in found])


@pytest.mark.parametrize(
    "work",
    [visible, chosen, attention, attention_gradient, scores, scores_of_chosen, index_gradient],
)
def test_same_bits(work):
    with triton_interpreter():
        assert torch.equal(work(far), work(torch.clone))
