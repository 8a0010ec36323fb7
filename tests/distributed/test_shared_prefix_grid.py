"""Packs in which shared prefixes stand once, against the float64 oracle, which has them each time.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 1, 2, 4.
"""

from dataclasses import replace

from tests.distributed import test_sparse_grid
from tests.distributed.test_oracle_grid import FORM, RECOMPUTE
from tests.distributed.test_sparse_grid import STAGES
from tests.support import dsa_layer, needs, world
from tests.support.backends import kernel_cases, kernels_running
from tests.support.cases import TINY, VARIANTS
from tests.support.combinations import few_ranks, grid
from tests.support.dsa import TINY_DSA
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import TREES, tree_layout
from tests.support.numerics import compare

pytestmark = needs.processes(1, 2, 4)
# Tensor- and context-parallel size, sequence parallelism and the exchange of latents.
SIZES = {
    1: [(1, 1, False, None)],
    2: [(2, 1, True, None), (1, 2, False, "p2p"), (1, 2, False, "all_gather")],
    4: [(2, 2, True, "p2p"), (1, 4, False, "all_gather"), (1, 4, False, "p2p")],
}.get(world.size(), [])
SHAPES = {"tiny": TINY, "sinks": replace(TINY, sinks=True), "scaled": VARIANTS["query_scaling"]}


@grid(
    2,
    {
        "sizes": {"-".join(map(str, size)): size for size in SIZES},
        "tree": [*TREES],
        "form": FORM,
        "recompute": RECOMPUTE,
        "shape": SHAPES,
    },
)
def test_training(sizes, shape, tree, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    tp, cp, sequence_parallel, exchange = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(
            sequence_parallel=sequence_parallel,
            form=form,
            recompute=recompute,
            cp_comm_type=exchange,
        )
        layout = tree_layout(tree, 1 if tp * cp == 1 else 2 * cp)
        execution = execute(shape, setup, layout)
        execution.check(error_table, "shared prefixes", tree)
        table = execution.table()
        compare(execution.tensors, execution.oracle(table), 1e-12).check("closer than the bar")


@grid(
    2,
    {
        "sizes": {"-".join(map(str, s)): s for s in SIZES if s[3] != "p2p"},
        "tree": [*TREES],
        "stage": STAGES,
        "recompute": test_sparse_grid.RECOMPUTE,
        "topk": (2, 7, 64),
    },
)
def test_sparse(sizes, tree, stage, recompute, topk):
    """A selection covers the prefixes, and the loss counts a token once for each sequence."""
    tp, cp, sequence_parallel, _ = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, recompute=recompute, form="auto")
        layout = tree_layout(tree, 1 if tp * cp == 1 else 2 * cp)
        more = {"context_parallel_size": cp, "cp_comm_type": "allgather"}
        dsa_layer.check(replace(TINY_DSA, topk=topk), setup, layout, stage, bound=1e-12, **more)


@few_ranks
@grid(1, {"case": {str(case): case for case in kernel_cases()}, "tree": ["deep", "deep_padded"]})
def test_kernels(case, tree, error_table):
    """What a kernel makes of the LSE of all nodes."""
    with kernels_running(case):
        execution = execute(case.mla, case.setup(), tree_layout(tree, 2))
    execution.check(error_table, "shared prefixes", tree)
