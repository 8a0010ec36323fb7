"""The pieces of sparse attention put together, against the oracle: every gradient, in float64.

The projections are the oracle's, so that what is tested is the indexer, the selection, the sparse
attention and the losses.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import self_attention_spans
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.sparse_reference import latent_inputs, sparse_attention
from absorbed_mla.dsa.support import chosen_keys, visible_keys
from absorbed_mla.sequences import SequenceLayout
from tests import oracle_dsa
from tests.oracle_dsa import OracleDSA, OracleDSAResult, OracleLoss
from tests.support.dsa import (
    PARAMETERS,
    VARIANTS,
    absorbed_rows,
    build_indexer,
    by_sequence,
    random_weights,
)
from tests.support.layouts import LAYOUTS, Layout, grid_layout
from tests.support.numerics import compare

BOUND = 1e-9
CPU = torch.device("cpu")


def evaluate(
    dsa: OracleDSA,
    weights: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    layout: Layout,
    loss: OracleLoss,
    chosen: Tensor | None = None,
) -> tuple[OracleDSAResult, Tensor]:
    """What ``oracle_dsa.evaluate`` gives, from the package; and the selection."""
    mla = dsa.mla
    indexer = build_indexer(dsa, weights)
    leaves = {n: weights[n].clone().requires_grad_() for n in mla.weight_shapes()}
    x = x.clone().requires_grad_()
    shape = layout.tokens, layout.batch
    table = mla.rotary_table(layout.tokens)
    made = by_sequence(
        layout.sequences, len(x), lambda s: absorbed_rows(mla, leaves, x[s.rows], table)
    )
    q_content, q_rope, kv = (t.unflatten(0, shape) for t in made)
    sequences = SequenceLayout.from_host(layout.packed_seq_params(CPU), layout.tokens)
    spans = self_attention_spans(sequences, causal=True)
    latent = oracle_dsa.query_latent(mla, leaves, x).unflatten(0, shape)
    cos, sin = (t[sequences.positions(CPU)] for t in table)
    index = indexer(x.unflatten(0, shape), latent, cos, sin)
    if chosen is None:
        chosen = select(index, spans, dsa.topk, relu=dsa.relu, elements=100)
    out, lse = sparse_attention(q_content, q_rope, kv, chosen, mla.softmax_scale())
    w_uv = leaves["w_uv"].view(mla.heads, mla.v, -1)
    heads = torch.einsum("sbhc,hvc->sbhv", out, w_uv)
    output = heads.flatten(2).flatten(0, 1) @ leaves["w_o"].T
    if loss.sparse:
        supports, lse = chosen_keys(chosen, kv.shape[-1], 1000), lse
    else:
        supports, lse = visible_keys(spans, layout.batch, CPU, 100), None
    rows = sum(span.num_queries for span in spans) * layout.batch
    reported = indexer_loss(
        index,
        latent_inputs(q_content, q_rope, kv),
        lse,
        supports,
        attention_scale=mla.softmax_scale(),
        factor=loss.coefficient / (1 if loss.per_token else rows),
        relu=dsa.relu,
    )
    ((output * output_grad).sum() + reported).backward()
    grads = {n: t.grad for n, t in leaves.items()}
    grads |= {n: indexer.get_parameter(its).grad for n, its in PARAMETERS.items()}
    return OracleDSAResult(output.detach(), reported.detach(), [], x.grad, grads), chosen


def named(result: OracleDSAResult) -> dict[str, Tensor]:
    return {
        "output": result.output,
        "loss": result.loss,
        "input gradient": result.input_grad,
        **result.weight_grads,
    }


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "sum"])
@pytest.mark.parametrize("sparse", [False, True], ids=["warm_up", "sparse"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_the_oracle(variant, layout, sparse, per_token):
    """Three heads of the indexer: many keys tie at a score of 0."""
    dsa, layout = VARIANTS[variant], grid_layout(layout, False)
    weights = random_weights(dsa)
    loss = OracleLoss(coefficient=0.7, sparse=sparse, per_token=per_token)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    output_grad = layout.random_rows(dsa.mla.hidden, seed=2).flatten(0, 1)
    found, _ = evaluate(dsa, weights, x, output_grad, layout, loss)
    truth = oracle_dsa.evaluate(dsa, weights, x, output_grad, layout.sequences, loss=loss)
    compare(named(found), named(truth), BOUND).check(variant)


def test_top_k_above_the_sequence_is_dense():
    dsa, layout = VARIANTS["topk_above"], grid_layout("thd_padded", False)
    weights = random_weights(dsa)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    ones = torch.ones_like(x)
    found, _ = evaluate(dsa, weights, x, ones, layout, OracleLoss())
    truth = oracle_dsa.evaluate(
        dsa, weights, x, ones, layout.sequences, loss=OracleLoss(sparse=False), dense=True
    )
    compare(named(found), named(truth), BOUND).check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_selection_of_another_layer(layout):
    """Shared, or replayed: attention and sparse loss over it, whatever this layer would choose."""
    dsa, layout = VARIANTS["deepseek"], grid_layout(layout, False)
    weights, others = random_weights(dsa), random_weights(dsa, seed=5)
    x = layout.random_rows(dsa.mla.hidden, seed=1).flatten(0, 1)
    ones = torch.ones_like(x)
    _, chosen = evaluate(dsa, others, x, ones, layout, OracleLoss())
    found, _ = evaluate(dsa, weights, x, ones, layout, OracleLoss(), chosen)
    theirs = oracle_dsa.forward(dsa, others, x, layout.sequences).chosen
    truth = oracle_dsa.evaluate(
        dsa, weights, x, ones, layout.sequences, loss=OracleLoss(), chosen=theirs
    )
    compare(named(found), named(truth), BOUND).check()
    own = oracle_dsa.forward(dsa, weights, x, layout.sequences).chosen
    assert any(not torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
