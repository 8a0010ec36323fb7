"""Layers with sparse attention straight from the spec, run on whole weights at any layout."""

import torch
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
)
from torch import Tensor, nn

from tests import oracle_dsa
from tests.oracle_dsa import OracleDSA, OracleDSAResult, OracleLoss
from tests.support import world
from tests.support.dsa import dsa_fields, random_weights
from tests.support.dsa_pieces import named
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    run,
    worst_over_ranks,
)
from tests.support.layouts import Layout
from tests.support.numerics import compare

BOUND = 1e-9


def build(
    dsa: OracleDSA,
    setup: Setup,
    weights: dict[str, Tensor],
    loss: OracleLoss | None = None,
    **changes,
) -> nn.Module:
    """The attention, with this rank's part of the oracle's weights."""
    fields = {**dsa_fields(dsa), **loss_fields(loss), **changes}
    attention = build_attention(dsa.mla, setup, **fields)
    load_weights(attention, dsa, setup, weights)
    return attention


def loss_fields(loss: OracleLoss | None) -> dict[str, object]:
    """Megatron's fields of how the indexer learns."""
    if loss is None:
        return {}
    return {
        "dsa_indexer_loss_coeff": loss.coefficient,
        "dsa_indexer_use_sparse_loss": loss.sparse,
        "calculate_per_token_loss": loss.per_token,
    }


def evaluate(
    attention: nn.Module, dsa: OracleDSA, setup: Setup, layout: Layout, **call
) -> OracleDSAResult:
    """What ``oracle_dsa.evaluate`` gives; input and output gradient are those of :func:`rows`."""
    DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(1.0, dtype=torch.float64))
    DSAIndexerLossLoggingHelper.tracker.clear()
    x, output_grad = (layout.random_rows(dsa.hidden, seed=seed) for seed in (1, 2))
    found = run(attention, dsa, setup, layout, x, output_grad, **call)
    return OracleDSAResult(
        found.output, reported_losses(), [], found.input_grad, found.weight_grads
    )


def reported_losses() -> Tensor:
    """What Megatron would log, the sum over layers, context-parallel ranks added up."""
    tracker = DSAIndexerLossLoggingHelper.tracker
    if "values" not in tracker:
        return torch.zeros((), dtype=torch.float64)
    total = tracker["values"].sum()
    if tracker["reduce_group"] is not None:
        total = world.all_reduce(total, group=tracker["reduce_group"])
    return total.double().cpu()


def check(
    dsa: OracleDSA,
    setup: Setup,
    layout: Layout,
    loss: OracleLoss | None,
    *,
    call: dict | None = None,
    dense: bool = False,
    bound: float = BOUND,
    **changes,
) -> None:
    """Compare output, loss and every gradient with the oracle, on all ranks.

    With ``dense`` its attention is over all keys: where bf16 rounds scores, others would be chosen.
    """
    weights = random_weights(dsa)
    attention = build(dsa, setup, weights, loss, **changes)
    found = named(evaluate(attention, dsa, setup, layout, **(call or {})))
    expected = named(truth(attention, dsa, weights, layout, loss, dense=dense))
    # Megatron's tracker is fp32.
    bounds = {name: max(bound, 1e-6) if name == "loss" else bound for name in expected}
    worst_over_ranks(compare(found, expected, bounds)).check()


def truth(
    attention: nn.Module,
    dsa: OracleDSA,
    weights: dict[str, Tensor],
    layout: Layout,
    loss: OracleLoss | None,
    **how,
) -> OracleDSAResult:
    """The oracle's result with the rotary table of the module."""
    table = module_table(attention, dsa.mla, layout)
    x, grad = (layout.random_rows(dsa.hidden, seed=seed).flatten(0, 1) for seed in (1, 2))
    return oracle_dsa.evaluate(
        dsa, weights, x, grad, layout.sequences, table=table, loss=loss, **how
    )
