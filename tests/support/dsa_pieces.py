"""The pieces of sparse attention put together, on any number of processes.

The projections are the oracle's, so that what is computed by the package is the indexer, the
selection, the sparse attention and the losses. Tensor-parallel ranks have their own heads,
context-parallel ranks their own queries; they gather the indexer's keys.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.core_attention.masks.spans import self_attention_spans
from absorbed_mla.dsa.index_vectors import IndexVectors
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
    sequence_parallel: bool = False,
) -> tuple[OracleDSAResult, Tensor]:
    """What ``oracle_dsa.evaluate`` gives, and the selection for this rank's queries.

    Args:
        dsa: The layer.
        weights: Whole, by the oracle's names.
        x: Hidden states of all rows, [R, hidden].
        output_grad: Likewise.
        layout: What the rows are.
        loss: How the indexer learns.
        chosen: A selection to be used instead.
        sequence_parallel: Whether tensor-parallel ranks project different tokens for the indexer.
    """
    mla, scale, device = dsa.mla, dsa.mla.softmax_scale(), world.device()
    tp_group, cp_group = world.tp_group(), world.cp_group()
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
    tokens, spans = torch.arange(layout.tokens), self_attention_spans(sequences, causal=True)
    if cp_group.size() > 1:
        part = ContextParallelLayout.of(sequences, cp_group.size(), cp_group.rank())
        tokens, spans = part.tokens(), part.gathered_spans(causal=True)
    heads = slice(
        mla.heads // tp_group.size() * tp_group.rank(),
        mla.heads // tp_group.size() * (tp_group.rank() + 1),
    )
    q_content, q_rope = (t[tokens][:, :, heads].contiguous() for t in (q_content, q_rope))
    rows = world.own_part(tokens, 0) if sequence_parallel else tokens
    latent = oracle_dsa.query_latent(mla, leaves, x).unflatten(0, shape)[rows]
    cos, sin = (t[sequences.positions(device)[rows]] for t in table)
    index = indexer(x.unflatten(0, shape)[rows], latent, cos, sin)
    if sequence_parallel:
        # Backward sums over ranks, which have taken turns with the queries.
        gathered = (gather_from_sequence_parallel_region(t, group=tp_group) for t in index)
        index = IndexVectors(*gathered)
    if cp_group.size() > 1:
        key = gather_from_sequence_parallel_region(index.key, group=cp_group)
        index = index._replace(key=key[part.sequence_order()])
    if chosen is None:
        chosen = select(index, spans, dsa.topk, relu=dsa.relu, tp_group=tp_group, elements=50)
    out, lse = sparse_attention(q_content, q_rope, kv, chosen, scale)
    w_uv = leaves["w_uv"].view(mla.heads, mla.v, -1)[heads]
    w_o = leaves["w_o"].view(mla.hidden, mla.heads, mla.v)[:, heads]
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
        tp_group=tp_group,
    )
    ((output * output_grad.unflatten(0, shape)[tokens]).sum() + reported).backward()

    whole = output.new_zeros(*shape, mla.hidden)
    whole[tokens] = output.detach()
    everywhere = dist.group.WORLD
    results = {"output": whole.flatten(0, 1), "x": x.grad, **{n: t.grad for n, t in leaves.items()}}
    results = {n: world.all_reduce(t, group=everywhere).cpu() for n, t in results.items()}
    for name, its in PARAMETERS.items():
        # Averaged over tensor-parallel ranks, as finalize_model_grads does.
        grad = world.all_reduce(indexer.get_parameter(its).grad, group=everywhere)
        results[name] = grad.cpu() / tp_group.size()
    total = world.all_reduce(reported.detach(), group=cp_group).cpu()
    result = OracleDSAResult(results.pop("output"), total, [], results.pop("x"), results)
    return result, chosen


def named(result: OracleDSAResult) -> dict[str, Tensor]:
    return {
        "output": result.output,
        "loss": result.loss,
        "input gradient": result.input_grad,
        **result.weight_grads,
    }
