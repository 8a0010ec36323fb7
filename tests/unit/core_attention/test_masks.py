"""Causal, padding and no masks, in both forms, against the oracle in float64."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from tests import oracle
from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    named_tensors,
    run,
)
from tests.support.layouts import dense
from tests.support.numerics import compare

TOKENS, BATCH = 11, 3


def key_padding() -> torch.Tensor:
    """Bool [B, 1, 1, S], True where a key is padding; one sequence is full, one has one token."""
    lengths = torch.tensor([TOKENS, 1, 6])
    return (torch.arange(TOKENS) >= lengths[:, None])[:, None, None]


def arbitrary() -> torch.Tensor:
    """Bool [B, 1, S, S], True where hidden; some queries see nothing at all."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) < 0.5
    hidden[1, :, 4] = True
    return hidden


CASES = {
    "causal": (AttnMaskType.causal, None),
    "causal_and_key_padding": (AttnMaskType.causal, key_padding),
    "padding": (AttnMaskType.padding, key_padding),
    "padding_without_mask": (AttnMaskType.padding, None),
    "no_mask": (AttnMaskType.no_mask, None),
    "arbitrary": (AttnMaskType.arbitrary, arbitrary),
    "padding_causal": (AttnMaskType.padding_causal, key_padding),
}


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("case", CASES)
def test_mask(case, form):
    """A token that sees too much trains on the future; one that sees too little learns nothing."""
    mask_type, make_mask = CASES[case]
    mask = make_mask() if make_mask else None
    visible = torch.ones(BATCH, TOKENS, TOKENS, dtype=torch.bool)
    if mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal):
        visible &= oracle.causal(TOKENS)
    if mask is not None:
        visible &= ~mask[:, 0]
    on_device = mask if mask is None else mask.to(world.device())
    setup = Setup(form=form, mask_type=mask_type)
    layout = dense(TOKENS, BATCH, visible)
    weights = random_weights(TINY)
    x, output_grad = layout.random_rows(TINY.hidden, 1), layout.random_rows(TINY.hidden, 2)
    attention = build_attention(TINY, setup)
    load_weights(attention, TINY, setup, weights)
    actual = named_tensors(TINY, run(attention, TINY, setup, layout, x, output_grad, on_device))
    rows = [t.flatten(0, 1) for t in (x, output_grad)]
    table = module_table(attention, TINY, layout)
    truth = oracle.evaluate(TINY, weights, *rows, layout.sequences, table)
    compare(actual, named_tensors(TINY, truth), 1e-9).check()
