"""Steps that Megatron captures in CUDA graphs: the tokens of the same steps without a graph."""

from __future__ import annotations

import contextlib

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.testing.engine import Request, dynamic_engine, generate, require_no_leak
from tests.support import needs
from tests.support.cases import WIDE
from tests.support.engine import generating_model, prompt

pytestmark = needs.gpu

SIZES = {
    "blocks": 13,
    "paused_blocks": 2,
    "max_sequence_length": 256,
    "max_requests": 8,
    "max_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "num_cuda_graphs": 4,
}
REQUESTS = [Request(prompt(100 + seed, seed, shared=70), 30) for seed in range(8)]


@pytest.fixture
def graphs():
    """The random-number tracker that graphs need, and the usual one afterwards."""
    seed = tensor_parallel.model_parallel_cuda_manual_seed
    yield lambda: seed(0, inference_rng_tracker=True, force_reset_rng=True)
    delete_cuda_graphs()
    seed(1234, force_reset_rng=True)


@pytest.mark.parametrize("scope", ["layer", "block"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_captured(graphs, scope, batch_invariant):
    """Both run the same kernels on the same sizes; one from the host, one from graphs."""
    with batch_invariant_mode() if batch_invariant else contextlib.nullcontext():
        _check_captured(graphs, scope, AbsorbedMLAOptions(batch_invariant=batch_invariant))


def _check_captured(graphs, scope, options):
    eager = generating_model(options, mla=WIDE, dtype=torch.bfloat16)
    with dynamic_engine(eager, **SIZES) as engine:
        expected = generate(engine, REQUESTS, log_probs=True)
    graphs()
    captured = generating_model(
        options,
        mla=WIDE,
        dtype=torch.bfloat16,
        cuda_graph_impl="local",
        inference_cuda_graph_scope=scope,
        inference_rng_tracker=True,
    )
    captured.load_state_dict(eager.state_dict())
    with dynamic_engine(captured, **SIZES) as engine:
        run = generate(engine, REQUESTS, log_probs=True)
        require_no_leak(engine)
    assert run.graph_steps == run.steps and run.chunks and run.prefix_blocks
    assert run.results == expected.results
