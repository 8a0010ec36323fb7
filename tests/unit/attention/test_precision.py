"""Where fp16 ends: the absorbed query is a product of two weights, and may leave fp16's range."""

import pytest
import torch
from torch import Tensor, nn

from absorbed_mla.absorb import absorb_query
from tests.support import world
from tests.support.cases import WIDE
from tests.support.harness import Setup, random_attention
from tests.support.layouts import dense

LARGE = 400.0


def layer(form: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """With large query and key weights, and its input."""
    setup = Setup(form=form, dtype=dtype, core_attention_backend="reference")
    attention = random_attention(WIDE, setup)
    with torch.no_grad():
        attention.linear_q_up_proj.weight *= LARGE
        attention.linear_k_up_proj.weight *= LARGE
    return attention, dense(16, 1).random_rows(WIDE.hidden, 1).to(world.device(), dtype)


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
    attention, x = layer(form, dtype)
    output, _ = attention(x.requires_grad_(), None)
    output.sum().backward()
    tensors = (output, x.grad, *(parameter.grad for parameter in attention.parameters()))
    assert all(bool(tensor.isfinite().all()) for tensor in tensors) is finite


def test_it_is_the_absorbed_query_that_overflows():
    attention, x = layer("absorbed", torch.float16)
    with torch.no_grad():
        query = attention._query(attention._query_latent(attention._down_project(x)[0]))
        q_nope = query.unflatten(-1, (WIDE.heads, -1))[..., : WIDE.nope]
        absorbed = absorb_query(q_nope, attention.linear_k_up_proj())
    assert q_nope.isfinite().all() and not absorbed.isfinite().all()
