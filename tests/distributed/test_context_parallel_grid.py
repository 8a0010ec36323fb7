"""Context parallelism against the float64 oracle on whole sequences.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4, 8: every way of
making N of TP 1 or 2 and CP 2 or 4. Each rank holds two chunks of every sequence; outputs, input
gradients and the gradients of every parameter are put together and compared as whole tensors.
On a CPU the combinations are thinned (tests/support/combinations.py).
"""

from dataclasses import replace

import pytest
import torch

from tests.distributed.test_oracle_grid import FORM, RECOMPUTE, backends, precision_shapes
from tests.support import needs, world
from tests.support.backends import kernel_cases, kernels_running
from tests.support.cases import VARIANTS
from tests.support.combinations import grid
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, cut_layout

# (TP, CP) for every number of processes.
SIZES = {2: [(1, 2)], 4: [(1, 4), (2, 2)], 8: [(2, 4)]}.get(world.size(), [])
NAMED_SIZES = {f"tp{tp}-cp{cp}": (tp, cp) for tp, cp in SIZES}

pytestmark = needs.processes(2, 4, 8)


@pytest.fixture
def sizes(request):
    """Tensor- and context-parallel size of a test."""
    tp, cp = request.param
    with world.parallel(tp=tp, cp=cp):
        yield tp, cp


SEQUENCE_PARALLEL = {"no_sp": False, "sp": True}
CP_COMM_TYPE = ("p2p", "all_gather")


def cp_grid(strength: int, dimensions: dict, all_sizes: dict = NAMED_SIZES):
    """The tests' grid of one size and kind of exchange or another."""
    if NAMED_SIZES and not all_sizes:
        return needs.processes(2, 4)
    return grid(
        strength,
        {"sizes": all_sizes, "cp_comm_type": CP_COMM_TYPE, **dimensions},
        # Sequence parallelism cuts over tensor-parallel ranks.
        unless=lambda row: row.get("sequence_parallel", False) and row["sizes"][0] == 1,
        indirect=["sizes"],
    )


@cp_grid(
    3,
    {
        "sequence_parallel": SEQUENCE_PARALLEL,
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": RECOMPUTE,
    },
)
def test_fp64(sizes, sequence_parallel, layout, cp_comm_type, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        form=form,
        recompute=recompute,
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table)


@cp_grid(2, {"sequence_parallel": SEQUENCE_PARALLEL, "layout": LAYOUTS, "form": FORM})
def test_fp64_column_parallel(sizes, sequence_parallel, layout, cp_comm_type, form, error_table):
    """The other down-projection."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        down_projection="column_parallel",
        form=form,
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table)


@cp_grid(
    2,
    {
        "variant": VARIANTS,
        "sequence_parallel": SEQUENCE_PARALLEL,
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": ("none", "both"),
    },
)
def test_fp64_variants(
    sizes, variant, sequence_parallel, layout, cp_comm_type, form, recompute, error_table
):
    """Output gates, a norm of k_rope, channels that are not rotated, scaled queries."""
    setup = Setup(
        sequence_parallel=sequence_parallel,
        form=form,
        recompute=RECOMPUTE[recompute],
        cp_comm_type=cp_comm_type,
    )
    execution = execute(variant, setup, cut_layout(layout, world.cp_size()))
    execution.check(error_table, "variants", layout)


def precision_sizes() -> dict[str, tuple[int, int]]:
    """On a CPU the others are checked in float64 only, which sees more."""
    if torch.cuda.is_available():
        return NAMED_SIZES
    return {name: size for name, size in NAMED_SIZES.items() if size[1] == 2}


@cp_grid(
    3,
    {
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": ("none", "both"),
        "dtype": {"float32": torch.float32, "bfloat16": torch.bfloat16},
        "backend": backends(),
        "shape": [*precision_shapes()],
    },
    precision_sizes(),
)
def test_precision(
    sizes, shape, backend, dtype, recompute, form, cp_comm_type, layout, error_table
):
    """Rounds no worse than three plain evaluations of the same equations at the same precision."""
    setup = Setup(
        sequence_parallel=world.tp_size() > 1,
        form=form,
        recompute=RECOMPUTE[recompute],
        dtype=dtype,
        backend=backend,
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table, shape)


def kernel_sizes() -> dict[str, tuple[int, int]]:
    """Interpreted kernels are slow, and with 8 processes meet nothing that they do not with 4."""
    return NAMED_SIZES if world.size() < 8 or torch.cuda.is_available() else {}


# The first combination is the hardest: the padded pack on the longest ring.
@cp_grid(
    1,
    {
        "case": {str(c): c for c in reversed(kernel_cases())},
        "backend": backends(),
        "window": (None, 5),
    },
    kernel_sizes(),
)
def test_kernels(sizes, case, backend, window, cp_comm_type, error_table):
    """If this fails, training with ``core_attention_backend`` of that name is wrong."""
    setup = case.setup(
        backend=backend, sequence_parallel=world.tp_size() > 1, cp_comm_type=cp_comm_type
    )
    with kernels_running(case):
        mla = replace(case.mla, window=window)
        execution = execute(mla, setup, cut_layout(case.layout, world.cp_size()))
    execution.check(error_table, "kernels", case.layout)


def check(setup: Setup, layout_name: str, error_table, shape: str = "tiny") -> None:
    """Compare one combination with the oracle, and record it."""
    execution = execute(precision_shapes()[shape], setup, cut_layout(layout_name, world.cp_size()))
    execution.check(error_table, shape, layout_name)
