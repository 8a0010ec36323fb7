"""The pieces of sparse attention put together.

The projections are the oracle's, so that what is computed by the package is the indexer, the
selection, the sparse attention and the losses.
"""

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import self_attention_spans
from absorbed_mla.dsa.indexer_loss import indexer_loss
from absorbed_mla.dsa.key_subset import chosen_keys, visible_keys
from absorbed_mla.dsa.selection import select
from absorbed_mla.dsa.sparse_reference import latent_inputs
from absorbed_mla.sequences import SequenceLayout
from tests import oracle_dsa
from tests.oracle_dsa import OracleDSA, OracleDSAResult, OracleLoss
from tests.support import world
from tests.support.dsa import (
    PARAMETERS,
    absorbed_rows,
    build_indexer,
    by_sequence,
    sparse_attention,
)
from tests.support.layouts import Layout


def evaluate(
    dsa: OracleDSA,
    weights: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    layout: Layout,
    loss: OracleLoss,
    chosen: Tensor | None = None,
) -> tuple[OracleDSAResult, Tensor]:
    """What ``oracle_dsa.evaluate`` gives, and the selection.

    Args:
        dsa: The layer.
        weights: Whole, by the oracle's names.
        x: Hidden states of all rows, [R, hidden].
        output_grad: Likewise.
        layout: What the rows are.
        loss: How the indexer learns.
        chosen: A selection to be used instead.
    """
    mla, scale, device = dsa.mla, dsa.mla.softmax_scale(), world.device()
    indexer = build_indexer(dsa, weights)
    leaves = {n: weights[n].to(device, copy=True).requires_grad_() for n in mla.weight_shapes()}
    x, output_grad = x.to(device, copy=True).requires_grad_(), output_grad.to(device)
    shape = layout.tokens, layout.batch
    table = tuple(t.to(device) for t in mla.rotary_table(layout.tokens))
    made = by_sequence(
        layout.sequences, len(x), lambda s: absorbed_rows(mla, leaves, x[s.rows], table)
    )
    q_content, q_rope, kv = (t.unflatten(0, shape) for t in made)
    sequences = SequenceLayout.from_host(layout.packed_seq_params(device), layout.tokens)
    spans = self_attention_spans(sequences, causal=True)
    latent = oracle_dsa.query_latent(mla, leaves, x).unflatten(0, shape)
    cos, sin = (t[sequences.positions(device)] for t in table)
    index = indexer(x.unflatten(0, shape), latent, cos, sin)
    group = world.tp_group()
    if chosen is None:
        chosen = select(index, spans, dsa.topk, relu=dsa.relu, tp_group=group, elements=50)
    out, lse = sparse_attention(q_content, q_rope, kv, chosen, scale)
    w_uv = leaves["w_uv"].view(mla.heads, mla.v, -1)
    w_o = leaves["w_o"].view(mla.hidden, mla.heads, mla.v)
    output = torch.einsum("sbhc,hvc,ohv->sbo", out, w_uv, w_o)
    if loss.sparse:
        subsets = chosen_keys(chosen, kv.shape[-1], 1000)
    else:
        subsets, lse = visible_keys(spans, layout.batch, device, 50), None
    num_rows = sum(len(sequence.rows) for sequence in layout.sequences)
    reported = indexer_loss(
        index,
        latent_inputs(q_content, q_rope, kv),
        lse,
        subsets,
        attention_scale=scale,
        factor=loss.coefficient / (1 if loss.per_token else num_rows),
        relu=dsa.relu,
        tp_group=group,
    )
    ((output * output_grad.unflatten(0, shape)).sum() + reported).backward()

    gradients = {name: leaf.grad.cpu() for name, leaf in leaves.items()}
    gradients |= {n: indexer.get_parameter(its).grad.cpu() for n, its in PARAMETERS.items()}
    whole, total = output.detach().flatten(0, 1).cpu(), reported.detach().cpu()
    return OracleDSAResult(whole, total, [], x.grad.cpu(), gradients), chosen


def named(result: OracleDSAResult) -> dict[str, Tensor]:
    return {
        "output": result.output,
        "loss": result.loss,
        "input gradient": result.input_grad,
        **result.weight_grads,
    }
