"""Models whose decode steps are captured in CUDA graphs, beside the same steps from the host."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.cuda_graphs import (
    delete_graphs,
    graph_fields,
    seed_generators,
)
from tests.support.cases import WIDE
from tests.support.engine import generating_model
from tests.support.overlap_scheduler import CASES, check, check_ahead

# Of decode steps; others run without.
FEW_GRAPHS = {
    "num_cuda_graphs": 2,
    "inference_config": {"use_cuda_graphs_for_non_decode_steps": False},
}


@pytest.fixture
def decode_graphs() -> Iterator[None]:
    """The random-number tracker that graphs need, and the usual one afterwards."""
    seed_generators(0, graphs=True)
    yield
    # NCCL cannot destroy a group of which a graph holds a collective (pytorch/pytorch#115388).
    delete_graphs()
    seed_generators(1234, graphs=False)


def made(*, graphs: bool, options: AbsorbedMLAOptions | None = None, **fields) -> GPTModel:
    """A model in bf16, whose layers Megatron captures one by one if ``graphs``."""
    fields = {"mla": WIDE, "dtype": torch.bfloat16, "inference_rng_tracker": True, **fields}
    return generating_model(options, **fields, **graph_fields("layer" if graphs else None))


def check_captured(
    case: str,
    options: AbsorbedMLAOptions | None = None,
    engine: dict[str, object] | None = None,
    **fields,
) -> None:
    """Check the overlap scheduler with graphs; the other engine runs steps of the same sizes.

    That runs them from the host: Megatron would join the graphs of two models in one process.
    ``options`` and ``fields`` are of the models, ``engine`` has more options of the engines.
    """
    found = dataclasses.replace(
        CASES[case], options={**CASES[case].options, **FEW_GRAPHS, **(engine or {})}
    )
    invariant = options is not None and options.batch_invariant
    for compare in (check, check_ahead) if invariant else (check,):
        # Megatron's graphs of a model are those of its first engine.
        ours, theirs = (made(graphs=graphs, options=options, **fields) for graphs in (True, False))
        theirs.load_state_dict(ours.state_dict())
        compare(ours, found, other=theirs)
        delete_graphs()
