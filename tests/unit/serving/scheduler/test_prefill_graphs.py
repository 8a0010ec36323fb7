"""Steps that read prompts, as CUDA graphs hold them: padded, recorded once and run again."""

import logging
import math
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.inference.batch_dimensions_utils import CUDAGraphBatchDimensionBuilder
from megatron.core.inference.batch_dimensions_utils import InferenceBatchDimensions as Size

from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.inference.attention import CachedAttention
from absorbed_mla.inference.backends import reference
from absorbed_mla.log_once import times_logged
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import ATTENTION_BACKENDS
from absorbed_mla.serving.engine import Engine
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler import prefill_graphs
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from absorbed_mla.serving.scheduler.prefill_graphs import (
    MOST_PAIRS,
    PrefillGraphs,
    _with_prompts,
    chosen_tokens,
    has_whole_prompts,
    pairs_of,
    prefill_sizes,
    why_none,
)
from tests.oracle_dsa import OracleDSA
from tests.support import needs
from tests.support.cases import TINY
from tests.support.dsa_models import generating_fields
from tests.support.engine import engine_of, generating_model, prompt, step_to_the_end
from tests.support.experts import FEW, grouped_model
from tests.support.models import MIXED
from tests.support.recorded_graphs import RecordedGraph
from tests.support.tile_reference import TileReference

pytestmark = needs.no_gpu

READS = ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__", "numpy")
MOST = 128
CHUNKS = {"chunked_prefill": True, "step_tokens": 128}
OPTIONS = {"num_cuda_graphs": 2, "prefill_graph_tokens": MOST, "blocks": 40}
# Of an engine that is not made.
SIZES = {"max_sequence_length": 64, "max_requests": 2, "num_cuda_graphs": 2}
GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
# Alone, together, and in chunks beside requests that decode.
BATCHES = [(20,), (100,), (30, 7, 50), (120,), (90,), (1, 2, 3, 4, 5, 6), (61,), (150, 20)]


class Recorded(FullCudaGraphs):
    """Graphs that raise at what waits for a GPU, and are operators run again."""

    def __init__(self, model):
        super().__init__(model)
        self.larger = set()

    def _captured(self, step, larger):
        self.larger.add(larger)

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
    """Of prompts only: a decode step's wait in pinned memory, and are tested with the scheduler."""
    own = []
    monkeypatch.setattr(reference._Keys, "__init__", all_keys)

    def made(host, model, of_decode, most):
        if not most:
            return None
        controller = host.controller
        width = host.context.max_requests, controller.vocab_size
        # As Megatron has them where it captures graphs.
        controller._all_logits_cuda = torch.zeros(1, *width)
        controller._enable_cuda_graph = True
        own.append(Recorded(model))
        return PrefillGraphs(host, own[0], most)

    monkeypatch.setattr("absorbed_mla.serving.engine.prefill_graphs", made)
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
        return step_to_the_end(engine)


def check(model, graphs, *, batches=BATCHES, error: float = 5e-5, **options) -> Engine:
    ours = engine_of(model, **{**OPTIONS, **options})
    theirs = engine_of(model, **{**OPTIONS, **options, "prefill_graph_tokens": 0})
    theirs.host.context.cuda_graph_batch_dimensions_list = []
    found, expected = (run(engine, batches=batches) for engine in (ours, theirs))
    assert len(found) == sum(map(len, batches))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and not one.error
        assert one.log_probs == pytest.approx(other.log_probs, abs=error, rel=0)
    return ours


@pytest.mark.parametrize("options", [{}, CHUNKS, {"prefix_caching": True}])
def test_same_tokens(graphs, options):
    """Of steps of many lengths from few graphs, none of which reads anything on the host."""
    engine = check(generating_model(num_layers=1), graphs, **options)
    sizes = {size for size, _ in graphs[0]._graphs}
    assert sizes <= set(prefill_sizes(MOST, 8)) and len(sizes) > 2
    assert graphs[0].larger == {MOST / size.token_count for size in sizes}
    assert engine.statistics.graph_steps


@pytest.fixture
def tiles(graphs, monkeypatch) -> TileReference:
    """The backend of graphs in which whole prompts attend expanded; of steps without one, too."""
    backend = TileReference()
    for name in ("_expanded_backend", "_backend_in_graphs"):
        monkeypatch.setattr(CachedAttention, name, lambda self, *_: backend)
    expanding = partial(PrefillGraphs, expands=True)
    monkeypatch.setattr(sys.modules[__name__], "PrefillGraphs", expanding)
    return backend


@pytest.mark.parametrize(("chunks", "latents"), [({}, "model"), (CHUNKS, "fp8")])
def test_whole_prompts(graphs, tiles, chunks, latents):
    """Expanded over the step's own tokens, beside rows that decode over the cache."""
    model = generating_model(AbsorbedMLAOptions(latent_cache_dtype=latents), num_layers=1)
    engine = check(model, graphs, **chunks, error=5e-5 if latents == "model" else 2e-3)
    assert not engine.host.context.reads_whole_prompts, "nor do graphs of decode steps"
    kinds = {whole for _, whole in graphs[0]._graphs}
    assert kinds == {True, False} and tiles.kinds == {"DeviceSpans", "Spans"}


def test_whole_prompts_have_no_bound_of_pairs(graphs, tiles):
    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    engine._prefill_graphs._most_pairs = 0
    assert in_graphs(engine, [100, 20]) == [True, True]


def test_captured_before_traffic(graphs, tiles, monkeypatch):
    """All sizes, the largest first; then only those of other rows than whole prompts."""
    engine, runs = engine_of(generating_model(num_layers=1), **OPTIONS), []
    context, run_step = engine.host.context, FullCudaGraphs.run
    with engine:
        with monkeypatch.context() as patch:

            def run(*args):
                runs.append(has_whole_prompts(context))
                run_step(*args)

            patch.setattr(FullCudaGraphs, "run", run)
            engine.capture()
        assert runs == [True] * len(graphs[0]._graphs), "another one reads what is not there"
        sizes = prefill_sizes(MOST, 8)
        assert list(graphs[0]._graphs) == [(size, True) for size in reversed(sizes)]
        captured = dict(graphs[0]._graphs)
        engine.capture()
        assert graphs[0]._graphs == captured
        for i in range(6):
            engine.add_request(prompt(10, i), GREEDY)
        with pytest.raises(RuntimeError, match="without requests"):
            engine.capture()
        engine.step()
        engine.add_request(prompt(60, 7), GREEDY)
        found = [result.tokens for result in step_to_the_end(engine)]
        more = graphs[0]._graphs.keys() - captured
        assert {whole for _, whole in more} == {False}, "six prompts"
    with pytest.raises(RuntimeError, match="started engine"):
        engine.capture()
    plain = engine_of(generating_model(num_layers=1), **{**OPTIONS, "prefill_graph_tokens": 0})
    prompts = [*(prompt(10, i) for i in range(6)), prompt(60, 7)]
    assert found == [one.tokens for one in plain.generate(prompts, [GREEDY] * 7)]
    with plain:
        plain.capture()  # nothing


@pytest.mark.parametrize("longest", [5, 20, 30, 40])
def test_sizes_that_few_prompts_do_not_fill_are_not_captured(graphs, tiles, longest):
    """Four prompts of the greatest length, and rows that decode."""
    engine = engine_of(generating_model(num_layers=1), **OPTIONS, max_sequence_length=longest)
    with engine:
        engine.capture()
        found = {size.token_count for size, _ in graphs[0]._graphs}
    assert found == {size for size in (64, 96, 128) if size <= 4 * longest + 4}


def test_a_capture_that_fails_leaves_no_requests(graphs, tiles, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no memory")

    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    with engine:
        monkeypatch.setattr(FullCudaGraphs, "run", refuse)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.capture()
        assert engine.host.context.total_request_count == 0


def test_larger_steps_of_other_rows_attend_expanded(graphs, tiles, monkeypatch):
    """Without a graph, where whole prompts have one."""
    monkeypatch.setattr(prefill_graphs, "_MOST_ABSORBED", 70)
    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    assert in_graphs(engine, [100]) == [True]
    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    with engine:
        for i in range(6):
            engine.add_request(prompt(15, i), GREEDY)
        engine.step()
        assert not engine.host.context.using_cuda_graph_this_step()


def without_reads(x, weights, ends, tokens=None, **_):
    """``grouped_product`` as on a GPU: on a CPU it reads how many rows an expert has."""
    rows = x if tokens is None else x[tokens]
    expert = torch.searchsorted(ends, torch.arange(len(rows), dtype=ends.dtype), right=True)
    found = torch.einsum("ri,eoi->reo", rows, weights)
    chosen = expert.clamp(max=len(weights) - 1)[:, None, None].expand(-1, 1, found.shape[2])
    return found.gather(1, chosen)[:, 0]


def test_grouped_experts(graphs, monkeypatch):
    monkeypatch.setattr("absorbed_mla.serving.experts.experts.grouped_product", without_reads)
    model = grouped_model(**FEW, cache_mla_latents=True)
    check(model, graphs, batches=BATCHES[:3])


def test_larger_steps_run_without(graphs):
    check(
        generating_model(num_layers=1), graphs, batches=[(140,), (129,)], prefill_graph_tokens=128
    )
    assert not graphs[0]._graphs


@pytest.mark.parametrize("moved", ["memory_buffer", "gpu_view"])
def test_graphs_of_another_context(moved):
    """Whose cache, or whose tables, are elsewhere."""

    def made() -> dict:
        return {"memory_buffer": torch.zeros(2), "gpu_view": SimpleNamespace(_buf=torch.zeros(2))}

    first, graphs = made(), FullCudaGraphs(torch.nn.Linear(2, 2))
    graphs.keep_for(SimpleNamespace(**first))
    graphs._graphs["step"] = None
    graphs.keep_for(SimpleNamespace(**first))
    assert graphs._graphs
    graphs.keep_for(SimpleNamespace(**{**first, moved: made()[moved]}))
    assert not graphs._graphs


def test_sizes():
    """One for every number of tokens: 32 between two of them, above 256 an eighth."""
    assert prefill_sizes(100, 2) == [Size(64, 2, 0), Size(96, 2, 0), Size(100, 2, 0)]
    assert prefill_sizes(10, 64) == [Size(10, 10, 0)]
    assert prefill_sizes(100, 80) == [Size(64, 64, 0), Size(96, 80, 0), Size(100, 80, 0)]
    found = prefill_sizes(3072, 64)
    tokens = [*range(64, 256, 32), *range(256, 512, 32), *range(512, 1024, 64)]
    tokens += [*range(1024, 2048, 128), *range(2048, 3073, 256)]
    assert found == [Size(count, 64, 0) for count in tokens]
    assert len(found) == 35
    assert prefill_sizes(2000, 64)[-1] == Size(2000, 64, 0)


@pytest.mark.parametrize("rows", [1, 3, 4, 48, 200])
def test_rows_that_sizes_are_captured_with(rows):
    """One-token rows and a few prompts of at least two, which Megatron pads to the size."""
    sizes = prefill_sizes(700, rows)
    for size in sizes:
        found = _with_prompts(size)
        assert found.token_count == size.token_count
        assert 1 <= found.prefill_req_count <= 4
        assert found.token_count >= 2 * found.prefill_req_count + found.decode_req_count
        assert CUDAGraphBatchDimensionBuilder.match_graph_config(found, sizes) == size


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
def test_smallest_size_is_taken(rows):
    """By Megatron, of which the padding is less than an eighth, or than 32 tokens."""
    sizes = prefill_sizes(1536, 64)
    for tokens in range(max(rows, 2), 1537):
        real = Size(tokens, 1, rows - 1)
        found = CUDAGraphBatchDimensionBuilder.match_graph_config(real, sizes)
        fitting = [one for one in sizes if one.token_count >= tokens]
        assert found == fitting[0]
        assert found.token_count - tokens < max(tokens / 8, 32) or tokens < 64
    too_large = Size(1537, 1, rows - 1)
    assert CUDAGraphBatchDimensionBuilder.match_graph_config(too_large, sizes) is None


@pytest.mark.parametrize("tp", [2, 3, 8])
def test_sizes_that_ranks_divide(tp):
    found = prefill_sizes(1000, 48, tp)
    assert found[-1] == Size(1000 // tp * tp, 48, 0)
    assert all(not one.token_count % tp and not one.prefill_req_count % tp for one in found)
    assert len({one.token_count for one in found}) == len(prefill_sizes(1000, 48))


def table(new: list[int], cached: list[int], paused: int = 0) -> SimpleNamespace:
    """A context's tables; rows behind those of requests hold anything."""
    return SimpleNamespace(
        paused_request_count=paused,
        total_request_count=len(new),
        request_query_lengths=torch.tensor([*new, 7000], dtype=torch.int32),
        request_kv_length_offsets=torch.tensor([*cached, 0], dtype=torch.int32),
    )


def test_pairs():
    """Of rows that attend expanded without a graph; paused requests have no part in the step."""
    assert pairs_of(table([1024], [0])) == 1024 * 512
    assert pairs_of(table([200, 300], [1000, 0])) == 200 * 1100 + 300 * 150
    assert pairs_of(table([100, 100], [0, 0], paused=1)) == 5000
    # Few new tokens, among them those of requests that decode, see their context absorbed anyway.
    assert pairs_of(table([1, 160, 100], [100_000, 100_000, 500])) == 0
    assert pairs_of(table([1, 180], [100_000, 100_000])) == 180 * 100_090 > 2**24
    assert pairs_of(table([100_000], [100_000])) == 15e9, "more than 32 bits hold"


@pytest.mark.parametrize(
    ("new", "cached", "whole"),
    [
        ([9], [0], True),
        ([1, 1, 9, 2], [5, 0, 0, 0], True),
        ([1, 9, 9, 9, 9], [5, 0, 0, 0, 0], True),
        ([9, 9, 9, 9, 9], [0, 0, 0, 0, 0], False),  # more than there is room for
        ([1, 9, 1], [5, 0, 0], False),  # a token behind a prompt
        ([1, 9, 9], [5, 0, 1], False),  # a prompt of which something is cached
        ([1, 1], [5, 0], False),
    ],
)
def test_which_rows_are_whole_prompts(new, cached, whole):
    assert has_whole_prompts(table(new, cached)) is whole
    # Not those of paused requests.
    assert has_whole_prompts(table([9, *new], [3, *cached], paused=1)) is whole


def in_graphs(engine: Engine, lengths) -> list[bool]:
    """Whether each step that reads a prompt runs as a graph, of prompts one after the other."""
    found, context = [], engine.host.context
    with engine:
        for length in lengths:
            engine.add_request(prompt(length), GREEDY)
            engine.step()
            found.append(context.using_cuda_graph_this_step())
            step_to_the_end(engine)
    return found


@pytest.mark.parametrize(("most", "taken"), [(5000, True), (4999, False)])
def test_steps_with_more_pairs_run_without(graphs, most, taken):
    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    engine._prefill_graphs._most_pairs = most
    assert in_graphs(engine, [100, 20]) == [taken, True]
    assert len(graphs[0]._graphs) == 1 + taken


def test_same_tokens_with_and_without_graphs(graphs, monkeypatch):
    """In turns, as the pairs of a step decide."""
    monkeypatch.setattr(PrefillGraphs.__init__, "__defaults__", (3000,))
    engine = check(generating_model(num_layers=1), graphs)
    assert len(graphs[0]._graphs) == 2 and engine.statistics.steps > engine.statistics.graph_steps


def test_sizes_of_decode_steps_stay(graphs):
    """Also where a step that reads prompts cannot be prepared."""
    engine = engine_of(generating_model(num_layers=1), **OPTIONS)
    context, controller = engine.host.context, engine.host.controller
    sizes = list(context.cuda_graph_batch_dimensions_list)
    assert sizes and not any(size.prefill_req_count for size in sizes)
    in_graphs(engine, [20])
    assert context.cuda_graph_batch_dimensions_list == sizes
    offered = []

    def refuse(**options):
        offered.append((options, context.cuda_graph_batch_dimensions_list))
        raise RuntimeError("cannot be prepared")

    engine._prefill_graphs._init = refuse
    for reading in (1, 0):
        context.num_prefill_requests = reading
        with pytest.raises(RuntimeError, match="cannot be prepared"):
            controller._dynamic_step_context_init(is_dummy_forward=True)
        assert context.cuda_graph_batch_dimensions_list == sizes
    assert [options for options, _ in offered] == [{"is_dummy_forward": True}] * 2
    assert offered[0][1] == prefill_sizes(MOST, 8) and offered[1][1] == sizes


def test_parity_mode(graphs):
    """To the bit, with as many pairs as there may be."""
    with batch_invariant_mode():
        options = AbsorbedMLAOptions(batch_invariant=True)
        check(generating_model(options, num_layers=1), graphs, error=0)
    assert graphs[0]._graphs


def with_cuda(there: bool) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: there))


@pytest.fixture
def captures(monkeypatch):
    """A model as it is built for CUDA graphs, where there is a GPU that captures them."""

    def made(*options: AbsorbedMLAOptions, **fields):
        model = generating_model(*options, **fields)
        model.config.cuda_graph_impl = "local"
        return model

    monkeypatch.setattr(prefill_graphs, "find_spec", lambda name: None)
    monkeypatch.setattr(prefill_graphs, "torch", with_cuda(True))
    return made


def with_layer(model, **fields):
    vars(model.decoder.layers[1].self_attention).update(fields)
    return model


def with_config(model, **fields):
    vars(model.config).update(fields)
    return model


def with_standard_attention(model):
    model.decoder.layers[1].self_attention = torch.nn.Identity()
    return model


def patched(owner, name: str, value):
    """A model as it should be, in a process that is not."""

    def made(make, monkeypatch):
        monkeypatch.setattr(owner, name, value)
        return make()

    return made


WHOLE_STEPS = "no CUDA graph holds whole decode steps"
TWO = {"owner": prefill_graphs.parallel_state, "value": lambda: 2}
# Why there are none, and a model for which that holds.
REASONS = {
    "config": (WHOLE_STEPS, lambda make, _: with_config(make(), cuda_graph_impl="none")),
    "padded experts": (
        "one after the other",
        lambda make, _: with_config(make(), moe_pad_experts_for_cuda_graph_inference=True),
    ),
    "sparse": (
        "attention is sparse",
        lambda make, _: make(**generating_fields(OracleDSA(mla=TINY, heads=2, width=16, topk=24))),
    ),
    "named FlashMLA": (
        "every request to the longest",
        lambda make, _: with_layer(
            make(), options=AbsorbedMLAOptions(paged_attention_backend="flash_mla")
        ),
    ),
    "FlashMLA": (
        "every request to the longest",
        patched(prefill_graphs, "find_spec", lambda name: name == "flash_mla"),
    ),
    "Megatron's": ("attention is Megatron's", lambda make, _: with_standard_attention(make())),
    "divided": (
        "prompts of their own",
        patched(prefill_graphs, "exchange_of", lambda model: "of ranks"),
    ),
    "context ranks": (WHOLE_STEPS, patched(name="get_context_parallel_world_size", **TWO)),
    "stages": (WHOLE_STEPS, patched(name="get_pipeline_model_parallel_world_size", **TWO)),
    "no GPU": (WHOLE_STEPS, patched(prefill_graphs, "torch", with_cuda(False))),
}


@pytest.mark.parametrize(("reason", "made"), REASONS.values(), ids=REASONS)
def test_why_none(captures, monkeypatch, reason, made):
    assert not why_none(captures())
    model = made(captures, monkeypatch)
    assert reason in why_none(model)
    assert chosen_tokens(model, EngineOptions(**SIZES)) == 0


@pytest.mark.parametrize(
    ("options", "most_pairs"),
    [({}, MOST_PAIRS), ({"form": "absorbed"}, math.inf), ({"batch_invariant": True}, math.inf)],
)
def test_what_attends_absorbed_anyway_has_no_bound(captures, options, most_pairs):
    host = engine_of(generating_model(num_layers=1), **OPTIONS).host
    model = captures(AbsorbedMLAOptions(**options))
    graphs = FullCudaGraphs(model)
    assert prefill_graphs.prefill_graphs(host, model, None, MOST) is None
    assert prefill_graphs.prefill_graphs(host, model, graphs, 0) is None
    assert prefill_graphs.prefill_graphs(host, model, graphs, MOST)._most_pairs == most_pairs


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 1536),
        ({"step_tokens": 8192}, 1536),
        ({"step_tokens": 1000}, 1000),
        ({"num_cuda_graphs": None}, 0),
        ({"num_speculative_tokens": 1}, 0),
        ({"decode_context_parallel": True}, 0),
        ({"decode_loop": False}, 0),
    ],
)
def test_chosen_tokens(captures, caplog, options, tokens):
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, prefill_graphs.logger.name):
        for _ in range(2):
            assert chosen_tokens(captures(), EngineOptions(**{**SIZES, **options})) == tokens
    messages = [r.message for r in caplog.records if r.name == prefill_graphs.logger.name]
    if tokens or "num_cuda_graphs" in options:
        assert not messages
        return
    [message], [(name, value)] = messages, options.items()
    assert f"do not go with {name}={value}" in message


@pytest.mark.parametrize(("form", "tokens"), [("auto", 3072), ("absorbed", 1536)])
def test_chosen_tokens_where_prompts_can_be_expanded(captures, monkeypatch, form, tokens):
    """The fastest backend, which is chosen without graphs, may not be one that they can have."""
    fastest, other = SimpleNamespace(reads_device_spans=False), TileReference()
    able = [fastest, other]
    monkeypatch.setattr(ATTENTION_BACKENDS, "examine", lambda *_: (able, {}))
    model = captures(AbsorbedMLAOptions(form=form))
    assert chosen_tokens(model, EngineOptions(**SIZES, step_tokens=8192)) == tokens
    attention = model.decoder.layers[0].self_attention.cached_attention
    assert attention._backend_in_graphs(torch.device("cpu"), torch.float32) is other
    able.pop()
    assert chosen_tokens(model, EngineOptions(**SIZES, step_tokens=8192)) == 1536


def test_reason_is_logged_once(caplog):
    times_logged.cache_clear()
    with caplog.at_level(logging.INFO, prefill_graphs.logger.name):
        for _ in range(2):
            assert engine_of(generating_model(**MIXED), **OPTIONS)._prefill_graphs is None
    [record] = [r for r in caplog.records if r.name == prefill_graphs.logger.name]
    assert "no CUDA graph holds whole decode steps here" in record.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill_graph_tokens": 4096}, "at most max_num_batched_tokens 2048, got 4096"),
        ({"prefill_graph_tokens": -1}, "prefill_graph_tokens must be an integer of at least 0"),
        ({"cuda_graphs": False}, "prefill_graph_tokens needs cuda_graphs=True, got False"),
        ({"num_speculative_tokens": 1}, "needs num_speculative_tokens=0, got 1"),
        ({"decode_context_parallel": True}, "decode_context_parallel=False or 'auto', got True"),
        ({"data_parallel_attention": True}, "needs data_parallel_attention=False, got True"),
    ],
)
def test_refused_options_of_llm(changes, message):
    with pytest.raises(ValueError, match=message):
        LLMOptions(**{"cuda_graphs": True, "prefill_graph_tokens": 64, **changes})


@pytest.mark.parametrize(("given", "tokens"), [(64, 64), (0, 0), (None, 0)])
def test_what_the_engine_gets(given, tokens):
    options = LLMOptions(cuda_graphs=True, prefill_graph_tokens=given)
    assert options.engine_options(64, None, None).prefill_graph_tokens == tokens
