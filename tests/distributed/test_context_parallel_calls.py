"""Context parallelism through calls of dense blocks.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 2, 4.
"""

import pytest

from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.distributed.test_oracle_grid import layout
from tests.support import needs, world
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.harness import Setup
from tests.support.layouts import cut_layout

pytestmark = needs.processes(2, 4)
cp_comm_type = pytest.mark.parametrize("cp_comm_type", ["all_gather", "p2p"])


class CountedCudnn(PlainCudnn):
    """Takes float64 on a CPU, and counts its calls."""

    name = "counted_cudnn"

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def why_not(self, request):
        return None if request.form == "expanded" else "it computes the expanded form"

    def dense_forward(self, *call):
        self.forwards += 1
        return super().dense_forward(*call)

    def dense_backward(self, *call):
        self.backwards += 1
        return super().dense_backward(*call)


def calls_of_a_rank(cp_comm_type: str, rank: int, size: int) -> int:
    """For one causal sequence."""
    if cp_comm_type == "p2p":
        return size
    # Keys before both chunks; the late chunk and what lies before it, the early one likewise.
    return 4 if rank else 3


@layout
@cp_comm_type
def test_dense_blocks(whole_world_cp, cp_comm_type, layout):
    """Gradients are the oracle's, with as few calls as masks aligned at the top left need."""
    backend = CountedCudnn()
    setup = Setup(
        form="expanded",
        cp_comm_type=cp_comm_type,
        core_attention_backend=backend.name,
        expansion_chunk_size=2**20,
    )
    with ATTENTION_BACKENDS.registered(backend):
        execute(TINY, setup, cut_layout(layout, world.cp_size())).check()
    assert backend.forwards == backend.backwards
    if layout == "sbhd":
        rank, size = world.cp_group().rank(), world.cp_size()
        assert backend.forwards == calls_of_a_rank(cp_comm_type, rank, size)
