"""Where fp16 ends: the absorbed query is a product of two weights, and may leave fp16's range."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.absorb import absorb_query
from tests.support import world
from tests.support.cases import WIDE, random_weights
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.layouts import dense

LARGE = 400.0


def layer(form: str, dtype: torch.dtype):
    setup = Setup(form=form, dtype=dtype, core_attention_backend="reference")
    attention = build_attention(WIDE, setup)
    weights = random_weights(WIDE)
    weights["w_uq"] *= LARGE
    weights["w_uk"] *= LARGE
    load_weights(attention, WIDE, setup, weights)
    return attention


def is_finite(form: str, dtype: torch.dtype) -> bool:
    """Output and gradients of a layer with large query and key weights."""
    attention = layer(form, dtype)
    x = dense(16, 1).random_rows(WIDE.hidden, 1).to(world.device(), dtype).requires_grad_()
    output, _ = attention(x, None)
    output.sum().backward()
    tensors = (output, x.grad, *(parameter.grad for parameter in attention.parameters()))
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.parametrize(
    ("form", "dtype", "finite"),
    [
        ("expanded", torch.float16, True),
        ("absorbed", torch.bfloat16, True),
        ("absorbed", torch.float16, False),
    ],
)
def test_large_weights(form, dtype, finite):
    """What docs/limitations.md says; an overflow is not silent, it is NaN."""
    assert is_finite(form, dtype) is finite


def test_it_is_the_absorbed_query_that_overflows():
    attention = layer("absorbed", torch.float16)
    x = dense(16, 1).random_rows(WIDE.hidden, 1).to(world.device(), torch.float16)
    with torch.no_grad():
        query = attention._query(attention._query_latent(attention._down_project(x)[0]))
        q_nope = query.unflatten(-1, (WIDE.heads, -1))[..., : WIDE.nope]
        absorbed = absorb_query(q_nope, attention.linear_k_up_proj())
    assert q_nope.isfinite().all() and not absorbed.isfinite().all()
