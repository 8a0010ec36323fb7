"""Steps that Megatron captures in CUDA graphs: the tokens of the same steps without a graph."""

import contextlib

import pytest
import torch

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.cuda_graphs import (
    delete_graphs,
    graph_fields,
    seed_generators,
)
from tests.oracle_dsa import OracleDSA
from tests.support import needs
from tests.support.cases import WIDE
from tests.support.dsa_models import generating_fields
from tests.support.engine import Request, engine_of, generate, generating_model, prompt

pytestmark = needs.gpu

SIZES = {
    "blocks": 13,
    "paused_blocks": 2,
    "step_tokens": 64,
    "chunked_prefill": True,
    "prefix_caching": True,
    "num_cuda_graphs": 4,
}
# Most tokens see more keys than they attend to.
SPARSE = OracleDSA(mla=WIDE, heads=4, width=64, topk=64)
REQUESTS = [Request(prompt(100 + seed, seed, shared=70), 30) for seed in range(8)]


@pytest.fixture
def graphs():
    """The random-number tracker that graphs need, and the usual one afterwards."""
    with contextlib.ExitStack() as after:
        after.callback(delete_graphs)
        yield lambda: seed_generators(0, graphs=True)
    seed_generators(1234, graphs=False)


@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_captured(graphs, scope, batch_invariant):
    """Both run the same kernels on the same sizes; one from the host, one from graphs."""
    with batch_invariant_mode() if batch_invariant else contextlib.nullcontext():
        _check_captured(graphs, scope, AbsorbedMLAOptions(batch_invariant=batch_invariant))


@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_sparse_attention(graphs, scope, backend):
    """The choice, the chosen keys' places and the attention, and a selection that is shared."""
    options = AbsorbedMLAOptions(sparse_attention_backend=backend, indexer_backend="triton")
    _check_captured(graphs, scope, options, **generating_fields(SPARSE))


def _check_captured(graphs, scope, options, **fields):
    fields = {"mla": WIDE, "dtype": torch.bfloat16, **fields}
    eager = generating_model(options, **fields)
    expected = generate(engine_of(eager, **SIZES), REQUESTS, log_probs=True)
    graphs()
    captured = generating_model(
        options, **fields, **graph_fields(scope), inference_rng_tracker=True
    )
    captured.load_state_dict(eager.state_dict())
    run = generate(engine_of(captured, **SIZES), REQUESTS, log_probs=True)
    done = run.statistics
    assert done.graph_steps == done.steps and done.chunks and done.prefix_blocks
    assert run.results == expected.results
