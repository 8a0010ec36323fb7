"""A cache that tensor-parallel ranks share: the tokens of one process, in a part of the memory."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.process_groups_config import ProcessGroupCollection

from absorbed_mla import LLM, AbsorbedMLAOptions
from absorbed_mla.inference import attention, prefill_context_parallel
from absorbed_mla.inference.backends.reference import ENTRY as REFERENCE
from absorbed_mla.inference.decode_context_parallel import attention as dcp_attention
from absorbed_mla.inference.decode_context_parallel.attention import (
    DecodeContextParallelAttention,
    SharedCachePart,
)
from absorbed_mla.inference.decode_context_parallel.context import _cache_ranks
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.serving.megatron_engine.allocator import pool_of
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE
from tests.distributed.engines import CROWDED, REQUESTS, alone, assert_crowded, assert_same
from tests.support import needs, world
from tests.support.cases import VARIANTS, model_options
from tests.support.combinations import few_ranks
from tests.support.dsa_models import generating_fields
from tests.support.engine import KEPT, Request, engine_of, generate, generating_model, prompt
from tests.support.models import MIXED
from tests.support.paged import PagedCase
from tests.support.shares import by_shares, share

pytestmark = needs.processes(2, 4)

SHARED = {"decode_context_parallel": True}
FP8 = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}


def generated(model, requests=REQUESTS, **options):
    """By a crowded engine whose cache the ranks share."""
    engine = engine_of(model, **{**CROWDED, **SHARED, **options})
    return generate(engine, requests, log_probs=True)


@pytest.fixture
def small_exchanges(monkeypatch) -> None:
    """Few tokens in one exchange, and prompts that are divided however short they are."""
    monkeypatch.setattr(dcp_attention, "_TOKEN_HEADS", 40)
    monkeypatch.setattr(prefill_context_parallel, "LEAST_TOKENS", 1)


def layouts(*cases):
    """Parametrize with sizes, of as many processes, and what comes with them."""
    marked = []
    for sizes, *more in cases:
        count = sizes.get("tp", 1) * sizes.get("cp", 1)
        marked.append(pytest.param(sizes, *more, marks=needs.processes(count)))
    return marked


@few_ranks
@pytest.mark.usefixtures("small_exchanges")
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_crowded(form):
    """Chunks, shared prefixes and a cache that is too small, beside one process."""
    # A context that is gathered in pieces.
    found = generated(generating_model(AbsorbedMLAOptions(form=form, context_chunk_size=48)))
    assert_same(found.results, alone().results)
    assert_crowded(found.statistics)


@needs.processes(2)
def test_beside_plain_tensor_parallelism():
    """The scheduler sees no difference."""
    model = generating_model(num_layers=1)
    found, plain = generated(model), generated(model, decode_context_parallel=False)
    assert_same(found.results, plain.results)
    assert found.statistics == plain.statistics


@few_ranks
def test_whole_prompts_in_steps_padded_for_graphs():
    model = generating_model(sequence_parallel=True)
    found = generate(engine_of(model, num_cuda_graphs=4, **SHARED), REQUESTS, log_probs=True)
    assert_same(found.results, alone().results)
    assert found.statistics.graph_steps == found.statistics.steps


@needs.processes(2)
def test_drafts():
    """Several tokens of a request see different numbers of a rank's keys."""
    found = generated(generating_model(mtp_num_layers=2), num_speculative_tokens=2)
    assert_same(found.results, alone(mtp_num_layers=2).results)
    assert found.statistics.evicted
    assert found.statistics.drafted > found.statistics.accepted


@pytest.mark.parametrize("sizes", layouts(({"tp": 2},), ({"cp": 2},)), ids=str)
def test_generated_blocks(sizes):
    """The next turn of a chat finds the answer, and evicted requests their own blocks."""
    # Of 129 tokens there are latents, in two full blocks.
    first, layers = Request(prompt(110), 20), {"num_layers": 1}
    with world.parallel(**sizes):
        model = generating_model(context_parallel_size=sizes.get("cp", 1), **layers)
        with engine_of(model, **KEPT, **SHARED) as engine:
            [answer] = generate(engine, [first]).tokens
            later = Request([*first.prompt, *answer, 1, 2], 4)
            found = generate(engine, [later], log_probs=True)
        crowded = generated(model, **KEPT)
    assert found.statistics.prefix_blocks == 2 and crowded.statistics.evicted
    with world.parallel(tp=1):
        expected = generate(engine_of(generating_model(**layers)), [later], log_probs=True)
    assert_same(found.results, expected.results)
    assert_same(crowded.results, alone(**layers).results)


@pytest.mark.usefixtures("small_exchanges")
@pytest.mark.parametrize(
    "sizes, form",
    layouts(
        ({"tp": 2}, "absorbed"),
        ({"cp": 2}, "expanded"),
    ),
    ids=str,
)
def test_fp8_cache(sizes, form):
    """Rows of another width; context-parallel ranks divide the prompts, too."""
    with world.parallel(**sizes):
        options = AbsorbedMLAOptions(form=form, context_chunk_size=48, **FP8)
        model = generating_model(options, context_parallel_size=sizes.get("cp", 1))
        engine = engine_of(model, **CROWDED, **SHARED)
        held = engine.host.context.memory_buffer
        found = generate(engine, REQUESTS, log_probs=True)
    blocks = CROWDED["blocks"] + 1
    # 24 values, a scale and 8 numbers of k_rope take 48 bytes, in each of 2 layers.
    assert held.nbytes == blocks * BLOCK_SIZE * 2 * 48 // world.size()
    # The last bits of sums over ranks may round a number to another one of e4m3.
    expected = alone(AbsorbedMLAOptions(**FP8)).results
    assert_same(found.results, expected, within=1e-3)


@few_ranks
def test_same_memory_holds_more():
    """By the host's own count of blocks, and by what then happens."""
    model = generating_model()
    size = (8 + 1) * BLOCK_SIZE * 2 * 32 * 4 / 2**30  # latents of 24 + 8 in 2 layers, fp32
    room = {"inference_config": {"buffer_size_gb": size}, "step_tokens": 640}
    requests = [Request(prompt(65, seed), 3) for seed in range(8)]
    few = engine_of(model, **room)
    many = engine_of(model, **room, **SHARED)
    blocks = [pool_of(engine.host.context.kv_block_allocator)[0] for engine in (few, many)]
    assert blocks[1] / blocks[0] >= {2: 1.9, 4: 3.7}[world.size()]
    memory = [engine.host.context.memory_buffer.nbytes for engine in (few, many)]
    assert memory[1] == memory[0]
    crowded, roomy = (generate(engine, requests, log_probs=True) for engine in (few, many))
    assert crowded.statistics.most_rows == 4 and roomy.statistics.most_rows == 8
    assert_same(roomy.results, crowded.results)


@few_ranks
def test_cache_tokens_take_a_part_of_the_memory():
    model = generating_model()
    whole, part = (engine_of(model, **more).host.context for more in ({}, SHARED))
    assert pool_of(whole.kv_block_allocator) == pool_of(part.kv_block_allocator)
    assert whole.memory_buffer.nbytes == world.size() * part.memory_buffer.nbytes


@few_ranks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "queries, keys",
    [((1, 1, 1, 1, 1), (1, 2, 16, 17, 40)), ((5, 1, 3, 18, 0), (5, 33, 3, 49, 0))],
    ids=["decode", "chunks"],
)
def test_attention(dtype, queries, keys):
    """Over the shares of all ranks, as over the whole cache, in the order of ranks to the bit."""
    case = PagedCase(queries, keys, heads=4, dtype=dtype, padding=3)
    q_content, q_rope, cache, rows, scale = case.inputs(world.device())
    ranks = CacheShares(world.tp_group())
    own_heads = slice(ranks.rank * 4 // ranks.size, (ranks.rank + 1) * 4 // ranks.size)
    own = [x[:, own_heads] for x in (q_content, q_rope)]
    backend = DecodeContextParallelAttention(REFERENCE, ranks)
    own_keys = share(cache, ranks.rank, ranks.size)
    out, lse = backend.forward(*own, own_keys, rows, scale)

    one, other = REFERENCE.forward(q_content, q_rope, cache, rows, scale)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, one[:, own_heads].to(lse.dtype), rtol=0, atol=8 * eps)
    torch.testing.assert_close(lse, other[:, own_heads], rtol=0, atol=1e-5)
    expected = by_shares(
        REFERENCE, ranks.size, q_content, q_rope, cache, rows, scale, heads=own_heads
    )
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@few_ranks
@pytest.mark.parametrize("start, end", [(0, 1), (0, 40), (5, 6), (7, 33), (16, 16), (39, 40)])
def test_gathered_keys(start, end):
    case = PagedCase((1,), (40,), dtype=torch.float32)
    _, _, cache, rows, _ = case.inputs(world.device())
    ranks = CacheShares(world.tp_group())
    found = cache.new_empty(end - start, cache.shape[-1])
    own = share(cache, ranks.rank, ranks.size)
    SharedCachePart(own, rows, ranks=ranks).gather(0, start, end, found)
    places = torch.arange(start, end, device=cache.device)
    expected = cache[rows.block_table[0].long()[places // 16], places % 16]
    assert torch.equal(found, expected)


@needs.processes(4)
def test_replicas_that_share_experts():
    """A rank without requests takes part in the experts' exchange, and in that of its replica."""
    fields = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [0, 1],
    }
    sizes = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}
    with world.parallel(tp=2, **sizes):
        own = parallel_state.get_data_parallel_rank()
        requests = REQUESTS[:2] if own else REQUESTS[2:7]
        model = generating_model(sequence_parallel=True, **fields, **sizes)
        found = generated(model, requests)
        plain = generated(model, requests, decode_context_parallel=False)
    assert_same(found.results, plain.results)


@few_ranks
def test_refused():
    accepted = "decode_context_parallel=True needs tensor_parallel_size .* at least 2 .* got 1"
    with world.parallel(tp=1), pytest.raises(ValueError, match=accepted):
        engine_of(generating_model(), **SHARED)
    parity = generating_model(AbsorbedMLAOptions(batch_invariant=True))
    with pytest.raises(ValueError, match=r"decode_context_parallel=True .* parity mode"):
        engine_of(parity, **SHARED)
    with pytest.raises(ValueError, match=r"decode_context_parallel=True .* parity mode"):
        LLM.from_model(parity, tokenizer="bytes", max_model_len=64, **SHARED)
    with pytest.raises(ValueError, match=r"decode_context_parallel=True .* sparse attention"):
        engine_of(generating_model(**generating_fields()), **SHARED)


@pytest.mark.parametrize("sizes", layouts(({"cp": 2},), ({"tp": 2, "cp": 2},)), ids=str)
def test_under_context_parallelism(sizes):
    """As a model is trained over context-parallel ranks: they share the cache, and agree."""
    with world.parallel(**sizes):
        model = generating_model(context_parallel_size=sizes["cp"])
        found = generated(model)
        whole = engine_of(model).host.context.memory_buffer
        part = engine_of(model, **SHARED).host.context.memory_buffer
        assert whole.nbytes == world.size() * part.nbytes
    assert_same(found.results, alone().results)


@needs.processes(2)
def test_ranks_of_given_groups():
    """Of a context made with process groups: all that hold a part of the tokens or heads."""
    with world.parallel(cp=2):
        groups = ProcessGroupCollection.use_mpu_process_groups()
        ranks = _cache_ranks(InferenceConfig(pg_collection=groups))
        assert (ranks.size, ranks.parts) == (2, 1)


@pytest.mark.usefixtures("small_exchanges")
@pytest.mark.parametrize(
    "sizes, form, sp",
    layouts(
        ({"cp": 2}, "absorbed", False),
        ({"cp": 2}, "expanded", False),
        ({"cp": 2}, "auto", False),
        ({"tp": 2, "cp": 2}, "expanded", True),
    ),
    ids=str,
)
def test_prompts_divided_over_context_parallel_ranks(sizes, form, sp, monkeypatch):
    """In chunks and behind prefixes, each rank with some of the new tokens of all layers."""
    # Rows of both forms beside each other, where the layer chooses.
    monkeypatch.setattr(attention, "is_cheaper_expanded", lambda *_, **__: _[-1][0] > 16)
    fields = {"context_parallel_size": sizes["cp"], "sequence_parallel": sp}
    parts = sizes["cp"] * (sizes.get("tp", 1) if sp else 1)
    # A layer whose queries are scaled by their positions.
    mla = {"mla": VARIANTS["all_variants"]} if form == "auto" else {}
    own = model_options(**mla) if mla else {}
    # What was cached is gathered in pieces, or together with the new tokens.
    both = form == "expanded" and not sp
    for chunk in (48, 4096)[: 1 + both]:
        with world.parallel(**sizes):
            options = AbsorbedMLAOptions(form=form, context_chunk_size=chunk, **own)
            model = generating_model(options, **fields, **mla)
            layer = Counting(model.decoder.layers[1].mlp)
            found = generated(model)
        assert_same(found.results, alone(**mla).results)
        assert layer.tokens.count(64 // parts) >= found.statistics.chunks > 4
        assert max(layer.tokens) == 64 // parts


class Counting:
    """Notes how many tokens a module gets in each call."""

    def __init__(self, module):
        self.tokens: list[int] = []
        module.register_forward_pre_hook(lambda _, inputs: self.tokens.append(len(inputs[0])))


@needs.processes(2)
def test_llm_of_a_live_model_under_context_parallelism():
    with world.parallel(cp=2):
        model = generating_model(context_parallel_size=2)
        with LLM.from_model(model, tokenizer="bytes", max_model_len=256, **SHARED) as llm:
            prompts = [list(request.prompt) for request in REQUESTS[:2]]
            params = [request.sampling() for request in REQUESTS[:2]]
            outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == alone().tokens[:2]


@needs.processes(2)
def test_context_parallel_ranks_agree():
    """Also where their logits differ, as kernels may make them that sum up in any order."""
    with world.parallel(cp=2):
        model = generating_model(context_parallel_size=2)
        expected = generate(engine_of(model, **SHARED), REQUESTS[:2])
        other = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 10 * world.rank()
        with torch.no_grad():
            model.register_forward_hook(lambda module, inputs, output: output + other.to(output))
        assert generate(engine_of(model, **SHARED), REQUESTS[:2]).tokens == expected.tokens


@needs.processes(2)
def test_refused_under_context_parallelism():
    with world.parallel(cp=2):
        model = generating_model(context_parallel_size=2, mtp_num_layers=1)
        with pytest.raises(ValueError, match=r"context_parallel_size=1, got 2: .* decode_context"):
            generate(engine_of(model), REQUESTS[:1])
        with pytest.raises(ValueError, match=r"num_speculative_tokens must be 0 .* got 1"):
            engine_of(model, num_speculative_tokens=1, **SHARED)


@needs.processes(2)
def test_divided_prompts_with_experts(monkeypatch):
    """Context-parallel ranks have some of the experts each, and send them their own tokens."""
    monkeypatch.setattr(prefill_context_parallel, "LEAST_TOKENS", 1)
    fields = {**MIXED, "moe_token_dispatcher_type": "alltoall"}
    with world.parallel(cp=2, expert_model_parallel_size=2):
        own = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
        model = generating_model(**fields, **own)
        divided = generated(model, REQUESTS[:5])
        monkeypatch.setattr(prefill_context_parallel, "LEAST_TOKENS", 10**6)
        whole = generated(model, REQUESTS[:5])
    assert_same(divided.results, whole.results)
