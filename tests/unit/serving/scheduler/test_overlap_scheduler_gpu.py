"""Whole decode steps in CUDA graphs: what Megatron's steps of the same sizes leave."""

import contextlib
from functools import partial

import pytest
import torch
from megatron.core.inference import utils as inference_utils

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.cuda_graphs import delete_graphs
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from tests.oracle_dsa import OracleDSA
from tests.support import needs
from tests.support.cases import WIDE
from tests.support.decode_graphs import FEW_GRAPHS, check_captured, decode_graphs, made  # noqa: F401
from tests.support.dsa_models import generating_fields
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.models import MIXED as EXPERTS
from tests.support.overlap_scheduler import CASES, GREEDY, check, sampled

pytestmark = [needs.gpu, pytest.mark.usefixtures("decode_graphs")]

SIZES = {"blocks": 40, **FEW_GRAPHS}
# Most tokens see more keys than they attend to.
SPARSE = OracleDSA(mla=WIDE, heads=4, width=64, topk=64)
PADDED_EXPERTS = {
    **EXPERTS,
    "moe_token_dispatcher_type": "alltoall",
    "moe_pad_experts_for_cuda_graph_inference": True,
}


@pytest.mark.parametrize(
    ("case", "batch_invariant"), [("graphs", False), ("everything", False), ("everything", True)]
)
def test_captured(case, batch_invariant):
    """Greedy, sampled and filtered steps; blocks that run out, requests that come and go."""
    with batch_invariant_mode() if batch_invariant else contextlib.nullcontext():
        check_captured(case, AbsorbedMLAOptions(batch_invariant=batch_invariant))


def test_memory_of_steps_that_grow():
    """Is that of the largest and of what was taken for a few sizes before it, not of all."""
    made, sizes, mib = [], range(1, 17), 2**20

    def step(size):
        for _ in range(2):
            made[:] = [torch.ones(size * 16 * mib, dtype=torch.uint8, device="cuda")]

    graphs = FullCudaGraphs(torch.nn.Linear(2, 2))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in sizes:
        graphs.run(size, partial(step, size), sizes[-1] / size)
        assert made[0].all()
        made.clear()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() - before
    largest = 2 * sizes[-1] * 16 * mib
    assert largest <= taken < 1.5 * largest
    graphs.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < largest / 4


def test_prompts():
    """Steps that read prompts, each in one graph: of one step, and of chunks beside decoding."""
    sizes = {"blocks": 40, "num_cuda_graphs": 2, "chunked_prefill": True, "step_tokens": 128}
    ours, theirs, results = made(graphs=True), made(graphs=False), []
    theirs.load_state_dict(ours.state_dict())
    prompts = [prompt(length, length) for length in (20, 150, 60, 5, 128)]
    eager = {**sizes, "num_cuda_graphs": None}
    for model, options in ((ours, {**sizes, "prefill_graph_tokens": 128}), (theirs, eager)):
        engine = engine_of(model, **options)
        # Captured, and replayed.
        results += [engine.generate(prompts, [GREEDY.replace(logprobs=0)] * 5) for _ in range(2)]
        if model is ours:
            assert engine.statistics.graph_steps == engine.statistics.steps
            keys = engine.scheduler.runner.graphs._graphs
            kinds = {whole for size, whole in keys if size.prefill_req_count}
            assert kinds == {True, False}, "whole prompts apart, and chunks"
        engine.close()
    for one, again, *others in zip(*results, strict=True):
        assert one == again
        # Other products round bfloat16 otherwise.
        assert one.log_probs[0] == pytest.approx(others[0].log_probs[0], abs=0.1)


def test_sparse_attention():
    options = AbsorbedMLAOptions(indexer_backend="triton")
    check_captured("graphs", options, **generating_fields(SPARSE))


def test_experts(monkeypatch):
    """One engine after the other: Megatron pads the experts of one model of the process."""
    results, weights = [], None
    for graphs in (True, False):
        monkeypatch.setattr(inference_utils, "moe_layer_cache", None)
        model = made(graphs=graphs, **PADDED_EXPERTS)
        weights = weights or model.state_dict()
        model.load_state_dict(weights)
        engine = engine_of(model, decode_loop=graphs, **SIZES)
        results.append(engine.generate([prompt(20), prompt(30)], [GREEDY, sampled(logprobs=0)]))
        assert engine.statistics.graph_steps
        engine.close()
    assert results[0] == results[1]


def test_eager():
    """Without graphs the same step runs from the host."""
    model = generating_model(mla=WIDE, dtype=torch.bfloat16)
    check(model, CASES["log-probs"])


def test_weights_that_change():
    """Graphs read weights where they are; an update in place is seen, and so are moved weights."""
    model = made(graphs=True)
    requests = [prompt(20), prompt(30)], [GREEDY, sampled(logprobs=0)]
    engine = engine_of(model, **SIZES)
    results = [engine.generate(*requests)]
    captured = dict(engine.scheduler.runner.graphs._graphs)
    assert captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    results.append(engine.generate(*requests))
    assert dict(engine.scheduler.runner.graphs._graphs) == captured
    for parameter in model.output_layer.parameters():
        parameter.data = parameter.data * 1.5
    results.append(engine.generate(*requests))
    assert dict(engine.scheduler.runner.graphs._graphs) != captured
    assert results[0] != results[1] != results[2]
    fresh = made(graphs=False)
    fresh.load_state_dict(model.state_dict())
    other = engine_of(fresh, decode_loop=False, **SIZES)
    assert other.generate(*requests) == results[2]


def test_deleted():
    """Sleeping frees the graphs of all engines."""
    engine = engine_of(made(graphs=True), **SIZES)
    engine.generate([prompt(20)], [GREEDY])
    assert engine.scheduler.runner.graphs._graphs
    delete_graphs()
    assert not engine.scheduler.runner.graphs._graphs


def test_the_host_waits_for_tokens_only():
    """Neither a request that comes nor a step waits for the device, while other requests run."""
    engine = engine_of(made(graphs=True), **SIZES)
    params = sampled(max_tokens=40)

    def come_and_go():
        for number in range(24):
            if number < 8:
                text = prompt(20 + number, number)
                engine.add_request(text, params.replace(max_tokens=9 + number))
            engine.step()

    with engine:
        for mode in ("default", "error"):  # Kernels are compiled, and graphs captured, at first.
            engine.add_request(prompt(20), params)
            for _ in range(3):
                engine.step()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                come_and_go()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            while engine.is_busy():
                engine.step()
        assert engine.statistics.mixed_steps >= 16
