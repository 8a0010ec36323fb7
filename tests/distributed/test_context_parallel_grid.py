"""Context parallelism against the float64 oracle on whole sequences.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4, 8: every way of
making N of TP 1 or 2 and CP 2 or 4. Each rank holds two chunks of every sequence; outputs, input
gradients and the gradients of every parameter are put together and compared as whole tensors.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_oracle_grid import (
    RECOMPUTE,
    SAME_TABLE_BOUND,
    backends,
    form,
    layout,
    precision_shapes,
)
from tests.support import world
from tests.support.backends import kernel_cases, kernels_running
from tests.support.certify import Execution, execute
from tests.support.harness import Setup, worst_over_ranks
from tests.support.layouts import cut_layout
from tests.support.numerics import bounds_from_eager, compare

# (TP, CP) for every number of processes.
SIZES = {2: [(1, 2)], 4: [(1, 4), (2, 2)], 8: [(2, 4)]}.get(world.size(), [])

pytestmark = pytest.mark.skipif(not SIZES, reason="context parallelism needs 2, 4 or 8 processes")


@pytest.fixture(scope="module", params=SIZES, ids=lambda s: f"tp{s[0]}-cp{s[1]}")
def sizes(request):
    """Tensor- and context-parallel size of the tests that use it."""
    tp, cp = request.param
    with world.parallel(tp=tp, cp=cp):
        yield tp, cp


def sequence_parallel_or_skip(on: bool) -> bool:
    if on and world.tp_size() == 1:
        pytest.skip("sequence parallelism needs TP > 1")
    return on


cp_comm_type = pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])
sequence_parallel = pytest.mark.parametrize(
    "sequence_parallel",
    [False, True] if world.size() >= 4 else [False],
    ids=lambda on: "sp" if on else "no_sp",
)


@sequence_parallel
@layout
@cp_comm_type
@form
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_fp64(sizes, sequence_parallel, layout, cp_comm_type, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    setup = Setup(
        sequence_parallel=sequence_parallel_or_skip(sequence_parallel),
        form=form,
        recompute=RECOMPUTE[recompute],
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table)


@sequence_parallel
@layout
@cp_comm_type
@form
def test_fp64_column_parallel(sizes, sequence_parallel, layout, cp_comm_type, form, error_table):
    """The other down-projection."""
    setup = Setup(
        sequence_parallel=sequence_parallel_or_skip(sequence_parallel),
        down_projection="column_parallel",
        form=form,
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table)


@layout
@cp_comm_type
@form
@pytest.mark.parametrize("recompute", ["none", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("shape", precision_shapes())
def test_precision(
    sizes, shape, backend, dtype, recompute, form, cp_comm_type, layout, error_table
):
    """Rounds no worse than three plain evaluations of the same equations at the same precision."""
    if sizes not in ((1, 2), (2, 2)) and not torch.cuda.is_available():
        pytest.skip("on a CPU these sizes are checked in float64, which sees more")
    setup = Setup(
        sequence_parallel=world.tp_size() > 1,
        form=form,
        recompute=RECOMPUTE[recompute],
        dtype=dtype,
        backend=backend,
        cp_comm_type=cp_comm_type,
    )
    check(setup, layout, error_table, shape)


@cp_comm_type
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("case", kernel_cases(), ids=str)
def test_kernels(sizes, case, backend, cp_comm_type, error_table):
    """If this fails, training with ``core_attention_backend`` of that name is wrong."""
    setup = case.setup(
        backend=backend, sequence_parallel=world.tp_size() > 1, cp_comm_type=cp_comm_type
    )
    with kernels_running(case):
        execution = execute(case.mla, setup, cut_layout(case.layout, world.cp_size()))
    check_execution(execution, setup, case.layout, error_table, "kernels")


def check(setup: Setup, layout_name: str, error_table, shape: str = "tiny") -> None:
    """Compare one combination with the oracle, and record it."""
    tokens = cut_layout(layout_name, world.cp_size())
    execution = execute(precision_shapes()[shape], setup, tokens)
    check_execution(execution, setup, layout_name, error_table, shape)


def check_execution(
    execution: Execution, setup: Setup, layout_name: str, error_table, shape: str
) -> None:
    """Compare what the layer made with the oracle, and record it."""
    dtype = setup.dtype
    exact = execution.oracle(execution.table())
    bounds = SAME_TABLE_BOUND
    if dtype != torch.float64:
        eager = execution.oracle(execution.table(), dtype)
        bounds = bounds_from_eager(eager, exact, dtype)
    deviation = worst_over_ranks(compare(execution.tensors, exact, bounds))
    combination = {"shape": shape, "layout": layout_name, **setup.describe()}
    error_table.add({**combination, "rotary_table": "module's float32"}, deviation)
    deviation.check(f"({dtype})")
