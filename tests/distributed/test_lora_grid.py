"""LoRA on every layer of the attention, in every way of executing it, against the oracle.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 1, 2, 4: at TP = N, and
where N divides at CP 2. The base is frozen; output, input gradient, and the gradients of A and B
are compared as whole tensors on every rank, with the oracle's own LoRA.
"""

from dataclasses import replace

import pytest
import torch

from tests.distributed.test_oracle_grid import DOWN_PROJECTION, FORM, RECOMPUTE, SEQUENCE_PARALLEL
from tests.support import world
from tests.support.cases import TINY
from tests.support.combinations import few_ranks, grid
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, cut_layout, grid_layout

_ALL = ("w_dq", "w_uq", "w_dkv", "w_uk", "w_uv", "w_o")
EVERY = replace(TINY, lora=_ALL)
MLAS = {
    "every layer": EVERY,
    "no q_lora_rank": replace(TINY, q_lora_rank=None, lora=("w_q", *_ALL[2:])),
    # Alone, a layer's LoRA is all that needs a gradient in its stage.
    **{f"only {name}": replace(TINY, lora=(name,)) for name in _ALL},
}
CONTEXT_PARALLEL = {"cp1": 1, **({"cp2": 2} if world.size() % 2 == 0 else {})}


@grid(
    2,
    {
        "mla": MLAS,
        "cp": CONTEXT_PARALLEL,
        "sequence_parallel": SEQUENCE_PARALLEL,
        "down_projection": DOWN_PROJECTION,
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": RECOMPUTE,
    },
    unless=lambda row: row["sequence_parallel"] and world.size() == row["cp"],
)
def test_fp64(mla, cp, sequence_parallel, down_projection, layout, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: LoRA trains wrongly there."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        down_projection=down_projection,
        form=form,
        recompute=recompute,
    )
    with world.parallel(tp=world.size() // cp, cp=cp):
        if cp == 1:
            tokens = grid_layout(layout, divisible=sequence_parallel)
        else:
            tokens = cut_layout(layout, cp)
        execute(mla, setup, tokens).check(error_table, "LoRA", layout)


@few_ranks
@pytest.mark.parametrize("form", FORM)
def test_precision(form, error_table):
    """bf16 rounds no worse than three plain evaluations."""
    setup = Setup(form=form, dtype=torch.bfloat16, recompute=("mla_up_proj", "core_attn"))
    execute(EVERY, setup, grid_layout("sbhd", divisible=False)).check(error_table, "LoRA", "sbhd")
