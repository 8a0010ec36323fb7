"""Causal, padding and no masks, in both forms, against the oracle in float64."""

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from tests import oracle
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import dense

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
    layout = dense(TOKENS, BATCH, visible)
    execute(TINY, Setup(form=form, mask_type=mask_type), layout, attention_mask=mask).check()
