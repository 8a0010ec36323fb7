"""The layer over cached latents, step by step, against the float64 oracle of whole sequences.

However a sequence is cut into prefill chunks and decoded tokens, a token's output is the one that
training gives it.
"""

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext

from tests import oracle
from tests.support import world
from tests.support.cases import TINY, VARIANTS, random_weights, shapes
from tests.support.combinations import few_ranks, grid
from tests.support.harness import (
    Setup,
    build_attention,
    load_weights,
    module_table,
    worst_over_ranks,
)
from tests.support.inference import infer_in_steps
from tests.support.layouts import dense
from tests.support.numerics import bounds_from_eager, compare

TOKENS, BATCH = 12, 3
CUTS = {"prefill": (12,), "chunks": (4, 8), "decode": (8, 1, 1, 1, 1), "tokens": (3, 2, 2, 1, 4)}
SEQUENCE_PARALLEL = [False, True] if world.size() > 1 else [False]
# What a step's tokens must divide by.
DIVISIBLE = {name for name, cuts in CUTS.items() if all(cut % 4 == 0 for cut in cuts)}


def check(mla, setup, cuts, error_table, shape_name):
    layout = dense(TOKENS, BATCH)
    weights = {n: w.to(setup.dtype).double() for n, w in random_weights(mla).items()}
    x = layout.random_rows(mla.hidden, 1).to(setup.dtype).double()
    attention = build_attention(mla, setup).eval()
    load_weights(attention, mla, setup, weights)
    got = infer_in_steps(attention, setup, x, CUTS[cuts])
    table = module_table(attention, mla, layout)

    def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rows = x.flatten(0, 1)
        found = oracle.evaluate(mla, weights, rows, rows, layout.sequences, table, dtype)
        return {"output": found.output}

    want = expected(torch.float64)
    bounds = 1e-9
    if setup.dtype is not torch.float64:
        bounds = bounds_from_eager(expected(setup.dtype), want, setup.dtype)
    deviation = worst_over_ranks(compare({"output": got.flatten(0, 1).cpu()}, want, bounds))
    combination = {"shape": shape_name, "layout": f"cached: {cuts}", **setup.describe()}
    error_table.add({**combination, "rotary_table": "module's float32"}, deviation)
    deviation.check()


@grid(
    2,
    {
        "cuts": [*CUTS],
        "form": ("absorbed", "expanded", "auto"),
        "down_projection": ("duplicated", "column_parallel"),
        "sequence_parallel": SEQUENCE_PARALLEL,
    },
    # The tokens of a step must divide by the tensor-parallel size.
    unless=lambda row: row["sequence_parallel"] and row["cuts"] not in DIVISIBLE,
)
def test_fp64(cuts, form, down_projection, sequence_parallel, error_table):
    setup = Setup(form=form, down_projection=down_projection, sequence_parallel=sequence_parallel)
    check(TINY, setup, cuts, error_table, "tiny")


SHAPES = {**shapes(world.size()), **VARIANTS}


@grid(1, {"shape": [*SHAPES], "form": ("absorbed", "expanded")})
def test_fp64_shapes(shape, form, error_table):
    check(SHAPES[shape], Setup(form=form), "tokens", error_table, shape)


@few_ranks
@grid(
    2,
    {
        "dtype": (torch.float32, torch.bfloat16, torch.float16),
        "form": ("absorbed", "expanded"),
        "resident": (None, 5),
    },
)
def test_precision(dtype, form, resident, error_table):
    setup = Setup(form=form, dtype=dtype, latent_cache_tokens=resident)
    check(TINY, setup, "tokens", error_table, "tiny")


@few_ranks
@grid(2, {"cuts": [*CUTS], "form": ("absorbed", "expanded"), "resident": (1, 5, 11)})
def test_offloaded(resident, form, cuts, error_table):
    """Most of the cache is in host memory, streamed a token or two at a time."""
    setup = Setup(form=form, latent_cache_tokens=resident)
    check(TINY, setup, cuts, error_table, "tiny")


@pytest.mark.parametrize("resident", [None, 4])
def test_batch_in_parts(resident):
    """Megatron may run a batch in parts, one after the other, in one context."""
    setup, layout = Setup(latent_cache_tokens=resident), dense(TOKENS, BATCH)
    attention = build_attention(TINY, setup).eval()
    load_weights(attention, TINY, setup, random_weights(TINY))
    x = layout.random_rows(TINY.hidden, 1)
    want = infer_in_steps(attention, setup, x, CUTS["tokens"])
    context = StaticInferenceContext(BATCH + 2, TOKENS + 5)
    parts = []
    for first, last in ((0, 2), (2, 3)):
        context.batch_size_offset, context.sequence_len_offset = first, 0
        parts.append(infer_in_steps(attention, setup, x[:, first:last], CUTS["tokens"], context))
    torch.testing.assert_close(torch.cat(parts, dim=1), want, atol=1e-12, rtol=0)
