"""Attention sinks of one layer: kinds of softmax, largest scores, what is trained, refusals."""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.harness import Setup, build_attention, module_table, random_attention
from tests.support.layouts import dense
from tests.support.refusal import refusal

SINKS = replace(TINY, sinks=True)
LAYOUT = dense(9, 2)


def rows() -> torch.Tensor:
    return LAYOUT.random_rows(TINY.hidden, 1).to(world.device())


def test_off_by_one_is_a_sink_of_zero():
    """Without a parameter and without an entry in checkpoints."""
    learned = random_attention(SINKS, Setup())
    fixed = build_attention(TINY, Setup(), softmax_type="off-by-one")
    assert "core_attention.softmax_offset" not in fixed.state_dict()
    missing = fixed.load_state_dict(learned.state_dict(), strict=False)
    assert missing.unexpected_keys == ["core_attention.softmax_offset"]
    torch.nn.init.zeros_(learned.core_attention.softmax_offset)
    assert torch.equal(fixed(rows(), None)[0], learned(rows(), None)[0])


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_largest_scores_are_those_of_keys(form):
    """QK-clip scales queries and keys, which make no score of a sink."""
    setup = Setup(form=form)
    attention = random_attention(SINKS, setup, qk_clip=True, log_max_attention_logit=True)
    attention(rows(), None)
    flat, table = rows().flatten(0, 1).cpu(), module_table(attention, SINKS, LAYOUT)
    wanted = oracle.max_logits(SINKS, random_weights(SINKS), flat, LAYOUT.sequences, table)
    found = attention.core_attention.current_max_attn_logits.cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("recompute", [(), ("core_attn",)], ids=["kept", "recomputed"])
def test_only_sinks_are_trained(recompute):
    """Recomputation returns their gradient where nothing else needs one."""
    attention = random_attention(SINKS, Setup(recompute=recompute))
    attention.requires_grad_(False)
    sink = attention.core_attention.softmax_offset.requires_grad_()
    attention(rows(), None)[0].sum().backward()
    assert sink.grad.abs().min() > 0


def test_target_of_an_indexer_over_other_keys():
    fields = dsa_fields(TINY_DSA) | {"dsa_indexer_loss_coeff": 1.0}
    with refusal("dsa_indexer_use_sparse_loss must be True", "softmax_type='learnable'"):
        build_attention(SINKS, Setup(form="auto"), **fields, dsa_indexer_use_sparse_loss=False)
