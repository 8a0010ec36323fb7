"""The layer with DeepSeek Sparse Attention against its float64 oracle, straight from the spec.

Output, the indexer's reported loss, input gradient and every parameter's gradient at 1e-9. Mean
losses in the warm-up, sums in the sparse stage.
"""

from __future__ import annotations

import pytest

from tests.oracle_dsa import OracleLoss
from tests.support import needs, world
from tests.support.combinations import grid
from tests.support.dsa import VARIANTS
from tests.support.dsa_layer import check
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, cut_layout

# Tensor- and context-parallel sizes, and whether there is sequence parallelism.
SIZES = {
    2: [(2, 1, False), (2, 1, True), (1, 2, False)],
    4: [(2, 2, False), (2, 2, True), (1, 4, False), (4, 1, True)],
}.get(world.size(), [(1, 1, False)])
STAGES = {
    "warm_up": OracleLoss(coefficient=0.7, sparse=False),
    "sparse": OracleLoss(coefficient=0.7, sparse=True, per_token=True),
}
# Each alone: tests/unit/dsa/test_core_attention.py.
RECOMPUTE = {"none": (), "both": ("mla_up_proj", "core_attn")}


@needs.processes(1, 2, 4)
@grid(
    2,
    {
        "sizes": {f"tp{t}-cp{c}" + "-sp" * s: (t, c, s) for t, c, s in SIZES},
        "layout": LAYOUTS,
        "stage": STAGES,
        "recompute": RECOMPUTE,
    },
)
def test_grid(sizes, layout, stage, recompute):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    tp, cp, sequence_parallel = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, recompute=recompute, form="auto")
        cut = cut_layout(layout, max(cp, 2))
        check(VARIANTS["deepseek"], setup, cut, stage, **_cp(cp))


def _cp(size: int) -> dict[str, object]:
    """Megatron wants its strategy named."""
    return {"context_parallel_size": size, "cp_comm_type": "allgather"}


@needs.processes(2, 4)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "deepseek"])
@pytest.mark.parametrize("sizes", SIZES[1:3], ids=lambda s: f"tp{s[0]}-cp{s[1]}")
def test_variants(sizes, variant):
    """RoPE layouts, ReLU, Hadamard, no q_lora_rank, no rotary channels, top-k above the length."""
    tp, cp, sequence_parallel = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, form="auto")
        layout = cut_layout("thd_padded", max(cp, 2))
        check(VARIANTS[variant], setup, layout, STAGES["sparse"], **_cp(cp))
