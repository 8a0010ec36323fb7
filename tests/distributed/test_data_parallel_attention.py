"""Whole attention on each rank, other weights divided: the tokens of one process."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.inference import utils as host_utils

from absorbed_mla import LLM, AbsorbedMLAOptions
from absorbed_mla.caching import full_cuda_graph
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import (
    exchange_of,
    shard_layers,
    shard_vocabulary,
)
from absorbed_mla.serving.scheduler.cuda_graphs import delete_graphs, graph_fields
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.distributed.engines import CROWDED, REQUESTS, alone, assert_crowded, assert_same
from tests.distributed.whole import of_all_ranks
from tests.support import needs, world
from tests.support.cases import WIDE
from tests.support.combinations import few_ranks
from tests.support.decode_graphs import FEW_GRAPHS, decode_graphs  # noqa: F401
from tests.support.divided import divided_model, divided_world
from tests.support.engine import engine_of, generate
from tests.support.models import MIXED
from tests.support.overlap_scheduler import count_calls

pytestmark = needs.processes(2, 4)

MODELS = {"dense": {}, "experts": MIXED}


def check(engine, loads, name: str = "dense"):
    """The tokens of this rank's requests are those of one process; returns statistics."""
    numbers = loads[world.rank()]
    found = generate(engine, [REQUESTS[number] for number in numbers], log_probs=True)
    expected = alone(**MODELS[name]).results
    assert_same(found.results, [expected[number] for number in numbers])
    return found.statistics


# By rank, numbers of requests: equal loads, or one rank with most of them and one without any.
EVEN = [[0, 4, 8], [1, 5], [2, 6], [3, 7]]
UNEVEN = [[], [0, 1, 2, 3, 4, 5, 6], [7], [8]]


@pytest.mark.parametrize(
    "name, experts, loads",
    [
        pytest.param("dense", 1, EVEN, marks=few_ranks),
        pytest.param("experts", 1, UNEVEN, marks=few_ranks),
        pytest.param("experts", 2, EVEN, marks=few_ranks),
        ("experts", 2, UNEVEN),
    ],
)
def test_crowded(name, experts, loads):
    """Chunks, shared prefixes and a cache that is too small, on ranks of different loads."""
    with divided_world(experts):
        engine = engine_of(divided_model(**MODELS[name]), **CROWDED)
        looped = count_calls(engine)
        done = check(engine, loads, name)
    assert bool(looped) == (loads is EVEN), "a rank without requests needs Megatron's step"
    if len(loads[world.rank()]) > 3:
        assert_crowded(done)


@few_ranks
@pytest.mark.parametrize("name, experts", [("dense", 1), ("experts", 2)])
def test_sizes_of_graphs(name, experts, monkeypatch):
    """All ranks take a graph, for equally many tokens, or none does."""
    fields = {"moe_pad_experts_for_cuda_graph_inference": True} if MODELS[name] else {}
    steps = []
    with divided_world(experts):
        monkeypatch.setattr(host_utils, "moe_layer_cache", None)
        model = divided_model(**MODELS[name], **fields)
        engine = engine_of(model, num_cuda_graphs=4)

        def note(module, inputs, output):
            steps.append((module.exchange.tokens, engine.host.context.using_cuda_graph_this_step()))

        model.embedding.word_embeddings.register_forward_hook(note)
        check(engine, UNEVEN, name)
    padded = [tokens for tokens, graph in steps if graph]
    assert all(min(tokens) == max(tokens) for tokens in padded)
    assert len({*map(tuple, padded)}) > 1 and len(steps) > len(padded)
    assert of_all_ranks(steps) == [steps] * world.size()


@needs.gpu
@pytest.mark.usefixtures("decode_graphs")
def test_captured():
    """The model of a step in a graph, its exchanges too; each rank draws its own tokens."""
    numbers, results = EVEN[world.rank()], []
    fields = {"mla": WIDE, "dtype": torch.bfloat16, "inference_rng_tracker": True}
    with divided_world():
        for graphs in (True, False):
            scope = graph_fields("layer" if graphs else None)
            engine = engine_of(divided_model(**fields, **scope), blocks=40, **FEW_GRAPHS)
            results.append(generate(engine, [REQUESTS[i] for i in numbers], log_probs=True))
            captured = engine.scheduler.runner.graphs
            assert graphs == bool(captured is not None and captured._graphs)
            engine.close()
            delete_graphs()
    assert results[0] == results[1]


@few_ranks
def test_llm_of_a_live_model():
    """Each rank has prompts of its own, and waits for the others at the end."""
    with divided_world():
        numbers = UNEVEN[world.rank()][:2]
        with LLM.from_model(divided_model(), max_model_len=256, max_num_seqs=4) as llm:
            prompts = [list(REQUESTS[i].prompt) for i in numbers]
            params = [REQUESTS[i].sampling() for i in numbers]
            outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = alone().tokens
    assert [one.outputs[0].token_ids for one in outputs] == [expected[i] for i in numbers]


@pytest.mark.parametrize("counts", [(3, 3, 3, 3), (0, 2, 5, 1), (4, 0, 0, 0)], ids=str)
def test_exchange(counts):
    """Rows of every rank, and sums for every rank, in their order and without padding."""
    exchange = TokenExchange(world.tp_group())
    rank, size = exchange.rank, exchange.size
    counts = counts[:size]
    assert exchange.counts(counts[rank]) == list(counts)
    whole = torch.arange(2.0 * sum(counts), device=world.device()).view(-1, 2)
    own = whole.split(counts)[rank]
    assert torch.equal(exchange.gather(own, counts), whole)
    assert torch.equal(exchange.sum_own(whole * (rank + 1), counts), own * sum(range(size + 1)))
    of_ranks = torch.cat([own + 100 * other for other in range(size)], 1)
    assert torch.equal(exchange.join_own(whole + 100 * rank, counts), of_ranks)


def test_counts_of_a_step_in_a_graph(monkeypatch):
    """Nothing is sent or read on the host: a replay would not do it again."""
    exchange = TokenExchange(world.tp_group())
    monkeypatch.setattr(dist, "all_gather_into_tensor", None)
    with full_cuda_graph():
        assert exchange.counts(5) == [5] * exchange.size


@few_ranks
def test_refused():
    with divided_world():
        model = divided_model()
        exchange = exchange_of(model)
        for options, error in (
            ({"num_speculative_tokens": 1}, "num_speculative_tokens must be 0 with data-parallel"),
            ({"host_cache_tokens": 64}, "host_cache_tokens must be 0 with .* got 64"),
            ({"prefix_cache_dir": "x", "prefix_caching": True}, "prefix_cache_dir must be None"),
        ):
            with pytest.raises(ValueError, match=error):
                engine_of(model, **options)
        with pytest.raises(ValueError, match=r"batch_invariant .* must be False"):
            engine_of(divided_model(AbsorbedMLAOptions(batch_invariant=True)))
        with pytest.raises(ValueError, match="is for inference"):
            model.train()(torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None], None)
        with pytest.raises(ValueError, match="moe_shared_expert_overlap must be False"):
            divided_model(
                **MIXED, moe_shared_expert_overlap=True, moe_token_dispatcher_type="alltoall"
            )
        with pytest.raises(ValueError, match=r"vocab_size must be a multiple of .* got 63"):
            model.vocab_size = 63
            shard_vocabulary(model, exchange)
    block = get_absorbed_mla_decoder_block_spec(model.config, backend="local")
    with pytest.raises(ValueError, match="tensor_model_parallel_size must be 1 with"):
        shard_layers(block, exchange)
    with world.parallel(tp=1), pytest.raises(ValueError, match="expert_tensor_parallel_size must"):
        shard_layers(block, exchange)
