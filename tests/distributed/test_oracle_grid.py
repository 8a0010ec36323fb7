"""Every way of executing the layer, at TP = world size, against the float64 oracle.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 1, 2, 4. Output, input
gradient and the gradient of every parameter are compared as whole tensors on every rank. Equality
with Megatron's own MLA at the same size would prove nothing: it has gradient bugs of its own.

1. float64 on one shape, where nothing hides behind rounding.
2. float64, all shapes on fewer combinations.
3. float32, bfloat16, float16: bounds from a plain evaluation of the oracle's equations.
4. Likewise with every kernel that this machine can run, whichever of them "auto" would take.

On a CPU the combinations are thinned (tests/support/combinations.py).
"""

import pytest
import torch

from tests.oracle import OracleMLA
from tests.support import world
from tests.support.backends import kernel_cases, kernels_running
from tests.support.cases import FUSED, TINY, VARIANTS, shapes
from tests.support.combinations import few_ranks, grid
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, grid_layout

RECOMPUTE = {
    "none": (),
    "mla_up_proj": ("mla_up_proj",),
    "core_attn": ("core_attn",),
    "both": ("mla_up_proj", "core_attn"),
}
SEQUENCE_PARALLEL = {"no_sp": False, "sp": True} if world.size() > 1 else {"no_sp": False}
DOWN_PROJECTION = ("duplicated", "column_parallel")
FORM = ("absorbed", "expanded")

sequence_parallel = pytest.mark.parametrize(
    "sequence_parallel", SEQUENCE_PARALLEL.values(), ids=SEQUENCE_PARALLEL
)
down_projection = pytest.mark.parametrize("down_projection", DOWN_PROJECTION)
form = pytest.mark.parametrize("form", FORM)
layout = pytest.mark.parametrize("layout", LAYOUTS)


def check_fp64(mla, setup, layout_name, error_table, shape_name):
    """Compare one combination with the oracle under both rotary tables, and record it."""
    tokens = grid_layout(layout_name, divisible=setup.sequence_parallel)
    execution = execute(mla, setup, tokens)
    execution.check(error_table, shape_name, layout_name)
    execution.check_own_table(error_table, shape_name, layout_name)


@grid(
    3 if world.size() == 1 else 2,
    {
        "sequence_parallel": SEQUENCE_PARALLEL,
        "down_projection": DOWN_PROJECTION,
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": RECOMPUTE,
    },
)
def test_fp64_grid(sequence_parallel, down_projection, layout, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        down_projection=down_projection,
        form=form,
        recompute=recompute,
    )
    check_fp64(TINY, setup, layout, error_table, "tiny")


@grid(
    2,
    {
        "shape": [*shapes(world.size())],
        "layout": ("sbhd", "thd_padded"),
        "sequence_parallel": SEQUENCE_PARALLEL,
        "down_projection": DOWN_PROJECTION,
        "form": FORM,
    },
)
def test_fp64_shapes(shape, layout, sequence_parallel, down_projection, form, error_table):
    """Dimensions that the grid's shape hides: no query compression, no rotary channels, ..."""
    setup = Setup(sequence_parallel=sequence_parallel, down_projection=down_projection, form=form)
    check_fp64(shapes(world.size())[shape], setup, layout, error_table, shape)


@few_ranks
@grid(
    2,
    {
        "variant": VARIANTS,
        "layout": LAYOUTS,
        "sequence_parallel": SEQUENCE_PARALLEL,
        "down_projection": DOWN_PROJECTION,
        "form": FORM,
        "recompute": RECOMPUTE,
    },
)
def test_fp64_variants(
    variant, layout, sequence_parallel, down_projection, form, recompute, error_table
):
    """Output gates, a norm of k_rope, channels that are not rotated, scaled queries."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        down_projection=down_projection,
        form=form,
        recompute=recompute,
    )
    check_fp64(variant, setup, layout, error_table, "variants")


@few_ranks
@grid(
    1, {"variant": VARIANTS, "form": FORM, "dtype": {"bf16": torch.bfloat16, "fp32": torch.float32}}
)
def test_precision_of_variants(variant, form, dtype, error_table):
    """Rounds no worse than the same equations at the same precision."""
    setup, tokens = Setup(form=form, dtype=dtype), grid_layout("sbhd", divisible=False)
    execute(variant, setup, tokens).check(error_table, "variants", "sbhd")


def backends() -> list[str]:
    """TransformerEngine's modules too, where they can run."""
    if not torch.cuda.is_available():
        return ["local"]
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return ["local", "transformer_engine"] if HAVE_TE else ["local"]


def precision_shapes() -> dict[str, OracleMLA]:
    """On GPUs also widths that fused kernels take."""
    return {"tiny": TINY, "fused": FUSED} if torch.cuda.is_available() else {"tiny": TINY}


def precision_cases() -> dict[str, tuple]:
    """float16 differs from bfloat16 by its range only: one layout is enough."""
    cases = {
        f"{name}-{layout}-{recompute}": (getattr(torch, name), layout, recompute)
        for name in ("float32", "bfloat16")
        for layout in LAYOUTS
        for recompute in ("none", "both")
    }
    return {**cases, "float16-sbhd-none": (torch.float16, "sbhd", "none")}


@few_ranks
@grid(
    2,
    {
        "shape": [*precision_shapes()],
        "backend": backends(),
        "case": precision_cases(),
        "form": FORM,
        "down_projection": DOWN_PROJECTION,
        "sequence_parallel": SEQUENCE_PARALLEL,
    },
)
def test_precision(shape, backend, case, form, down_projection, sequence_parallel, error_table):
    """Rounds no worse than three plain evaluations of the same equations at the same precision."""
    dtype, layout, recompute = case
    setup = Setup(
        sequence_parallel=sequence_parallel,
        down_projection=down_projection,
        form=form,
        recompute=RECOMPUTE[recompute],
        dtype=dtype,
        backend=backend,
    )
    mla, tokens = precision_shapes()[shape], grid_layout(layout, divisible=sequence_parallel)
    execute(mla, setup, tokens).check(error_table, shape, layout)


@few_ranks
@grid(
    1,
    {
        "case": {str(case): case for case in kernel_cases()},
        "backend": backends(),
        "sequence_parallel": SEQUENCE_PARALLEL,
    },
)
def test_kernels(case, backend, sequence_parallel, error_table):
    """If this fails, training with ``core_attention_backend`` of that name is wrong."""
    setup = case.setup(backend=backend, sequence_parallel=sequence_parallel)
    tokens = grid_layout(case.layout, divisible=sequence_parallel)
    with kernels_running(case):
        execution = execute(case.mla, setup, tokens)
    execution.check(error_table, "kernels", case.layout)
