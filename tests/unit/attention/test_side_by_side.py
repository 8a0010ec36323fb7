"""The layer beside Megatron's own MLASelfAttention, which gets its state dict from nowhere else.

At tensor-parallel size 1, where Megatron's gradients are right. Agreement here means that a model
trained with one continues with the other.
"""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.support import world
from tests.support.cases import TINY, random_weights
from tests.support.harness import Setup, build_attention, named_tensors, run
from tests.support.layouts import LAYOUTS, grid_layout
from tests.support.numerics import bounds_from_eager, compare
from tests.support.standard import build_standard, load_standard, run_standard

SHAPES = {
    "yarn": TINY,
    "rope": replace(TINY, rope_type="rope", scaling_factor=1.0, mscale_all_dim=0.0),
    "q_lora_none": replace(TINY, q_lora_rank=None, latent_norm=False),
}
# Megatron multiplies positions and frequencies in float32: a few 1e-7 rad at a dozen tokens.
TABLE_ALLOWANCE = 1e-6


@pytest.mark.skipif(world.size() > 1, reason="Megatron's gradients are wrong above TP=1")
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_agrees_with_megatron(dtype, shape, layout_name, form):
    """The standard's own state dict, loaded as it is, gives the standard's output and gradients."""
    mla, layout = SHAPES[shape], grid_layout(layout_name, divisible=False)
    setup = Setup(form=form, dtype=dtype)
    weights = {n: w.to(dtype).double() for n, w in random_weights(mla).items()}
    x, output_grad = (layout.random_rows(mla.hidden, i).to(dtype) for i in (1, 2))

    standard, absorbed = build_standard(mla, setup), build_attention(mla, setup)
    load_standard(standard, mla, setup, weights)
    absorbed.load_state_dict(standard.state_dict())

    expected = named_tensors(mla, run_standard(standard, mla, layout, x, output_grad))
    actual = named_tensors(mla, run(absorbed, mla, setup, layout, x, output_grad))
    rows = [t.flatten(0, 1) for t in (x, output_grad)]
    exact, eager = (
        named_tensors(mla, oracle.evaluate(mla, weights, *rows, layout.sequences, None, d))
        for d in (torch.float64, dtype)
    )
    bounds = bounds_from_eager(eager, exact, dtype)
    bounds = {name: bound + TABLE_ALLOWANCE for name, bound in bounds.items()}
    compare(actual, expected, bounds).check("(absorbed against Megatron's)")
