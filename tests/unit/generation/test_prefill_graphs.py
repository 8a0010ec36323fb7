"""Steps that read prompts, as CUDA graphs hold them: padded, recorded once and run again."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions as Size

from absorbed_mla.generation import prefill_graphs
from absorbed_mla.generation.decode_loop.graphs import StepGraphs
from absorbed_mla.generation.decode_loop.loop import DecodeLoop
from absorbed_mla.generation.engine import Engine
from absorbed_mla.generation.options import EngineOptions
from absorbed_mla.generation.prefill_graphs import PrefillGraphs, prefill_sizes, why_none
from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.inference.backends import reference
from absorbed_mla.llm.options import LLMOptions
from absorbed_mla.log_once import times_logged
from absorbed_mla.options import AbsorbedMLAOptions
from tests.oracle_dsa import OracleDSA
from tests.support import needs
from tests.support.cases import TINY
from tests.support.dsa_models import generating_fields
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.experts import FEW, grouped_model
from tests.support.models import MIXED
from tests.support.recorded_graphs import RecordedGraph

pytestmark = needs.no_gpu

READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__", "numpy")
MOST = 128
OPTIONS = {"num_cuda_graphs": 2, "prefill_graph_tokens": MOST, "blocks": 40}
GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
# Alone, together, and in chunks beside requests that decode.
BATCHES = [(20,), (100,), (30, 7, 50), (120,), (90,), (1, 2, 3, 4, 5, 6), (61,), (150, 20)]


class Recorded(StepGraphs):
    """Graphs that raise at what waits for a GPU, and are operators run again."""

    def _captured(self, step):
        def refuse(*_, **__):
            raise RuntimeError("a number is read on the host")

        graph = RecordedGraph()
        step()
        with pytest.MonkeyPatch.context() as patch, graph:
            for name in READS:
                patch.setattr(torch.Tensor, name, refuse)
            step()
        return graph


def all_keys(self, cache, decode, table, last, max_keys):
    """Of the reference as on a GPU: on a CPU it reads how many keys there are."""
    self.cache, self.decode, self.table, self.last = cache, decode, table, last
    self.tiles = range(0, max_keys, reference.TILE_KEYS)


@pytest.fixture
def graphs(monkeypatch) -> Iterator[Recorded]:
    """Of prompts only: a decode step's wait in pinned memory, and are tested with the loop."""
    own = []
    monkeypatch.setattr(reference._Keys, "__init__", all_keys)

    def made(host, model, loop, most):
        if not most:
            return None
        controller = host.controller
        width = host.context.max_requests, controller.vocab_size
        # As Megatron has them where it captures graphs.
        controller._all_logits_cuda = torch.zeros(1, *width)
        controller._enable_cuda_graph = True
        own.append(Recorded(model))
        return PrefillGraphs(host, own[0], most)

    monkeypatch.setattr("absorbed_mla.generation.engine.prefill_graphs", made)
    yield own


def run(engine: Engine, *, batches=BATCHES) -> list:
    """Tokens and log-probabilities of prompts, batch by batch."""
    with engine:
        for number, lengths in enumerate(batches):
            for i, length in enumerate(lengths):
                engine.add_request(prompt(length, 10 * number + i), GREEDY)
            # The next batch is read while this one decodes.
            for _ in range(3):
                engine.step()
        while engine.is_busy():
            engine.step()
        return [engine.results[number] for number in sorted(engine.results)]


def check(model, graphs, *, batches=BATCHES, **options) -> Engine:
    ours = engine_of(model, **{**OPTIONS, **options})
    theirs = engine_of(model, **{**OPTIONS, **options, "prefill_graph_tokens": 0})
    theirs.host.context.cuda_graph_batch_dimensions_list = []
    found, expected = (run(engine, batches=batches) for engine in (ours, theirs))
    assert len(found) == sum(map(len, batches))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and not one.error
        assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)
    return ours


@pytest.mark.parametrize("chunks", [{}, {"chunked_prefill": True, "step_tokens": 128}])
def test_same_tokens(graphs, chunks):
    """Of steps of many lengths from few graphs, none of which reads anything on the host."""
    engine = check(generating_model(), graphs, **chunks)
    sizes = graphs[0]._graphs.keys()
    assert set(sizes) <= set(prefill_sizes(MOST, 8)) and len(sizes) > 2
    assert engine.statistics.graph_steps


def test_prefixes(graphs):
    check(generating_model(), graphs, prefix_caching=True)


def test_latents_in_fp8(graphs):
    check(generating_model(AbsorbedMLAOptions(latent_cache_dtype="fp8")), graphs)


def without_reads(x, weights, ends, tokens=None):
    """``grouped_product`` as on a GPU: on a CPU it reads how many rows an expert has."""
    rows = x if tokens is None else x[tokens]
    expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=ends.dtype), right=True)
    found = torch.einsum("ri,eoi->reo", rows, weights)
    chosen = expert.clamp(max=len(weights) - 1)[:, None, None].expand(-1, 1, found.shape[2])
    return found.gather(1, chosen)[:, 0]


def test_grouped_experts(graphs, monkeypatch):
    monkeypatch.setattr("absorbed_mla.experts.experts.grouped_product", without_reads)
    model = grouped_model(**FEW, cache_mla_latents=True)
    check(model, graphs, batches=BATCHES[:3])


def test_larger_steps_run_without(graphs):
    check(generating_model(), graphs, batches=[(140,), (129,)], prefill_graph_tokens=128)
    assert not graphs[0]._graphs


def test_graphs_of_another_cache(graphs):
    """Another buffer than the one that graphs have been captured with."""
    engine = check(generating_model(), graphs, batches=[(20,)])
    first = next(iter(graphs[0]._graphs.values()))
    context = engine.host.context
    graphs[0].keep_for(context)
    assert graphs[0]._graphs
    context.memory_buffer = context.memory_buffer.clone()
    graphs[0].keep_for(context)
    assert first and not graphs[0]._graphs


def test_sizes():
    assert prefill_sizes(256, 64) == [
        *(Size(256, 64, 0), Size(256, 4, 0), Size(128, 64, 0), Size(128, 4, 0)),
        *(Size(64, 64, 0), Size(64, 4, 0)),
    ]
    assert prefill_sizes(100, 2) == [Size(100, 2, 0), Size(64, 2, 0)]
    assert prefill_sizes(10, 64) == [Size(10, 10, 0), Size(10, 4, 0)]
    assert len(prefill_sizes(2048, 256)) == 12


def test_why_none(monkeypatch):
    model, sparse = generating_model(), OracleDSA(mla=TINY, heads=2, width=16, topk=24)
    loop = DecodeLoop.__new__(DecodeLoop)
    loop.graphs, loop.together = None, False
    assert "whole decode steps" in why_none(model, None) == why_none(model, loop)
    loop.graphs = StepGraphs(model)
    assert not why_none(model, loop)
    loop.together = True
    assert "prompts of their own" in why_none(model, loop)
    loop.together = False
    model.config.moe_pad_experts_for_cuda_graph_inference = True
    assert "one after the other" in why_none(model, loop)
    assert "sparse" in why_none(generating_model(**generating_fields(sparse)), loop)
    options = AbsorbedMLAOptions(paged_attention_backend="flash_mla")
    monkeypatch.setattr(prefill_graphs, "find_spec", lambda name: None)
    model = generating_model()
    assert not why_none(model, loop)
    model.decoder.layers[1].self_attention.options = options
    assert "every request to the longest" in why_none(model, loop)
    model.decoder.layers[1].self_attention.options = AbsorbedMLAOptions()
    monkeypatch.setattr(prefill_graphs, "find_spec", lambda name: name == "flash_mla")
    assert "every request to the longest" in why_none(model, loop)


def test_reason_is_logged_once(caplog):
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, prefill_graphs.logger.name):
        for _ in range(2):
            assert engine_of(generating_model(**MIXED), **OPTIONS)._prefill_graphs is None
    [record] = [r for r in caplog.records if r.name == prefill_graphs.logger.name]
    assert "no CUDA graph holds whole decode steps here" in record.message


SIZES = {"max_sequence_length": 64, "max_requests": 2, "num_cuda_graphs": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_graph_tokens": 4096}, "from 0 to step_tokens 2048, got 4096"),
        ({"prefill_graph_tokens": -1}, "got -1"),
        ({"num_cuda_graphs": None}, "got num_cuda_graphs=None"),
        ({"decode_loop": False}, "got decode_loop=False"),
        ({"num_speculative_tokens": 1}, "got num_speculative_tokens=1"),
        ({"decode_context_parallel": True}, "got decode_context_parallel=True"),
    ],
)
def test_options_of_the_engine(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**{**SIZES, "prefill_graph_tokens": 64, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_graph_tokens": 4096}, "at most max_num_batched_tokens 2048, got 4096"),
        ({"prefill_graph_tokens": -1}, "prefill_graph_tokens must be an integer of at least 0"),
        ({"cuda_graphs": False}, "cuda_graphs must be True with prefill_graph_tokens, got False"),
        ({"num_speculative_tokens": 1}, "num_speculative_tokens must be 0"),
        ({"decode_context_parallel": True}, "decode_context_parallel must be False"),
        ({"data_parallel_attention": True}, "data_parallel_attention must be False"),
    ],
)
def test_options_of_the_front(changes, message):
    with pytest.raises(ValueError, match=message):
        LLMOptions(**{"cuda_graphs": True, "prefill_graph_tokens": 64, **changes})
    given = LLMOptions(cuda_graphs=True, prefill_graph_tokens=64)
    assert given.engine_options(64, None, None).prefill_graph_tokens == 64
