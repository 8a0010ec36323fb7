"""The overlap scheduler over tensor-parallel ranks: those of Megatron's scheduler."""

import dataclasses

import pytest

from absorbed_mla.batch_invariant import batch_invariant_mode
from tests.support import needs
from tests.support.decode_graphs import check_captured, decode_graphs  # noqa: F401
from tests.support.engine import generating_model
from tests.support.overlap_scheduler import CASES, check, check_ahead, parity_model

pytestmark = needs.processes(2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(sequence_parallel):
    model = generating_model(sequence_parallel=sequence_parallel, num_layers=1)
    check(model, CASES["everything"])


def test_launched_ahead():
    """Every rank launches the same steps ahead."""
    with batch_invariant_mode():
        check_ahead(parity_model(num_layers=1), CASES["everything"])


def test_shared_cache():
    """Each rank has a part of every block."""
    case = CASES["everything"]
    options = {**case.options, "decode_context_parallel": True}
    check(generating_model(num_layers=1), dataclasses.replace(case, options=options))


@needs.gpu
@pytest.mark.usefixtures("decode_graphs")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_captured(shared, sequence_parallel):
    """The exchanges of a step are in its graph."""
    check_captured(
        "everything",
        engine={"decode_context_parallel": shared},
        sequence_parallel=sequence_parallel,
        num_layers=2,
    )
