"""Generation with sparse attention, by every kind of context: the tokens of whole forwards.

In fp32 on the CPU, with four layers, two of which share a selection of an earlier one.
"""

from dataclasses import replace

import pytest
import torch

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.batch_invariant import batch_invariant_mode
from absorbed_mla.dsa.replay import record_selections
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, all_block_bytes
from tests.support.cases import INTERPRETED
from tests.support.dsa import dsa_fields
from tests.support.dsa_models import DSA, generating_fields
from tests.support.engine import Request, engine_of, generate, generating_model
from tests.support.generation import by_dynamic_context, by_forwards, by_static_context, prompts_of
from tests.support.parity import cached, chunkings, parity_model, tokens_of, trained
from tests.support.refusal import refusal
from tests.support.training import Training, differing

# All longer than top-k but one; longer and shorter than a block.
PROMPTS = prompts_of((5, 70, 130, 2, 64))
NUM_TOKENS = 5
ON_GPU = torch.cuda.is_available()
# The kernels for GPUs need other widths.
PARITY = replace(DSA, mla=INTERPRETED, width=16) if ON_GPU else DSA
FP8_CACHE = {"latent_cache_dtype": "fp8", "train_on_cached_latents": True}
FP8 = AbsorbedMLAOptions(**FP8_CACHE)
CROWDED = {"step_tokens": 64, "prefix_caching": True, "blocks": 6, "paused_blocks": 1}


def model_of(options: AbsorbedMLAOptions | None = None, **changes):
    return generating_model(options, **generating_fields(init_method_std=0.4, **changes)).eval()


def assert_same(found, expected) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected):
        assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)


@pytest.fixture(scope="module", params=[None, FP8], ids=["", "fp8"])
def options(request):
    """Of the attention; keys are chosen by index keys of the model's dtype in both cases."""
    return request.param


@pytest.fixture(scope="module")
def model(options):
    return model_of(options)


@pytest.fixture(scope="module")
def expected(model):
    return by_forwards(model, PROMPTS, NUM_TOKENS)


def requests_of(*prompts) -> list[Request]:
    return [Request(prompt, NUM_TOKENS) for prompt in prompts]


def test_static(model, expected):
    found = by_static_context(model, PROMPTS[1:3], NUM_TOKENS, prefill_size=24)
    assert_same(found, expected[1:3])


@pytest.mark.parametrize(
    ("options_of_engine", "happened"),
    [
        ({}, lambda done: done.most_rows > 1),
        (
            CROWDED,
            lambda done: done.chunks and done.prefix_blocks and done.evicted + done.most_paused,
        ),
        ({"num_cuda_graphs": 4}, lambda done: done.graph_steps),
    ],
    ids=["", "crowded", "as-for-graphs"],
)
def test_engine(model, expected, options_of_engine, happened):
    """Also with chunks, a prefix cache, and too few blocks for all requests."""
    engine = engine_of(model, **{"step_tokens": 128, "chunked_prefill": True, **options_of_engine})
    run = generate(engine, requests_of(*PROMPTS, PROMPTS[2]), log_probs=True)
    assert_same(run.results, [*expected, expected[2]])
    assert happened(run.statistics), run.statistics


def test_layers_that_are_captured(model, expected, monkeypatch):
    """Megatron runs a layer at least twice then, before the one that shares its selection."""
    infer = AbsorbedMLASelfAttention._infer
    monkeypatch.setattr(
        AbsorbedMLASelfAttention,
        "_infer",
        lambda self, *args: (infer(self, *args), infer(self, *args))[1],
    )
    found = by_dynamic_context(model, PROMPTS[1:2], NUM_TOKENS, num_cuda_graphs=4)
    assert_same(found, expected[1:2])


@pytest.mark.parametrize("options", [FP8], indirect=True, ids=["fp8"])
@pytest.mark.parametrize(
    ("others", "changes", "bound"),
    [(FP8, {"dsa_indexer_topk": 256}, 1e-2), (None, {}, 1e-3)],
    ids=["all-keys", "exact-latents"],
)
def test_what_these_tests_see(model, expected, others, changes, bound):
    other = model_of(others, **changes)
    other.load_state_dict(model.state_dict())
    [text] = by_forwards(other, PROMPTS[2:3], NUM_TOKENS)
    assert abs(text.log_probs[0] - expected[2].log_probs[0]) > bound


def test_speculative_decoding(options):
    """Drafts are computed without a context; accepted tokens are those without drafts."""
    model, requests = model_of(options, mtp_num_layers=2), requests_of(*PROMPTS)
    alone = generate(engine_of(model), requests)
    run = generate(engine_of(model, num_speculative_tokens=2), requests)
    assert run.tokens == alone.tokens and run.statistics.drafted


def test_prefix_cache_on_disk(model, expected, tmp_path):
    """Without its index keys a block from the folder would choose other keys."""
    options = {"prefix_caching": True, "prefix_cache_dir": tmp_path}
    for blocks in (0, 2):
        found = generate(engine_of(model, **options), requests_of(PROMPTS[2]), log_probs=True)
        assert found.statistics.disk_blocks == blocks
        assert_same(found.results, expected[2:3])


def test_memory(model, options):
    """What the engine allocates is what its sizes are counted with.

    Latents of 4 layers, in fp32 or 48 bytes each, and index keys of fp32 in the two that choose.
    """
    context = engine_of(model, blocks=10).host.context
    latents, keys = context.memory_buffer, context.index_keys
    assert keys.shape == (2, 11, BLOCK_SIZE, DSA.width) and keys.dtype == torch.float32
    if options is FP8:
        assert latents.nbytes == 11 * BLOCK_SIZE * 4 * 48
    assert latents.nbytes + keys.nbytes == 11 * all_block_bytes(model)


def test_memory_of_a_model_without_an_indexer():
    dense = generating_model()
    memory = engine_of(dense, blocks=10).host.context.memory_buffer
    assert memory.nbytes == 11 * all_block_bytes(dense)


@pytest.mark.parametrize("generated", [by_static_context, by_dynamic_context])
def test_training_goes_on_as_if_nothing_had_been_generated(generated):
    fields = generating_fields(dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=True)
    through, training = (Training(generating_model(**fields)) for _ in range(2))
    expected = through.steps(2)
    losses = training.steps(1)
    training.model.eval()
    before = generated(training.model, PROMPTS[:2], 3)
    losses += training.steps(1)
    assert losses == expected
    assert not differing(training.state(), through.state())
    assert generated(training.model.eval(), PROMPTS[:2], 3) != before


def test_selections_of_captured_steps(model, monkeypatch):
    monkeypatch.setattr(model.config, "cuda_graph_impl", "local")
    with refusal("cuda_graph_impl='none', got 'local'"), record_selections(model):
        pass


class TestParity:
    """Equal to the bit in training, prefill and decode."""

    @pytest.fixture(autouse=True)
    def _on(self):
        with batch_invariant_mode():
            yield

    @pytest.mark.parametrize(
        ("topk", "dtype", "cache"),
        [
            (7, torch.bfloat16 if ON_GPU else torch.float32, {}),
            (70, torch.bfloat16, {}),
            (7, torch.bfloat16, FP8_CACHE),
        ],
    )
    def test_bits(self, dtype, topk, cache):
        """Parts of the text are shorter than top-k: on a CPU such forwards choose nothing."""
        fields = {**dsa_fields(PARITY), "dsa_indexer_topk": topk, "num_layers": 4}
        more = {"options": cache, "dsa_indexer_topk_freq": 2, "softmax_type": "learnable"}
        model = parity_model(dtype, mla=PARITY.mla, **more, **fields)
        tokens = tokens_of()
        expected = trained(model, tokens)
        assert torch.equal(trained(model, tokens[1:, :72]), expected[1:, :72])
        for name, sizes in chunkings().items():
            assert torch.equal(cached(model, tokens, sizes), expected), name
            assert torch.equal(cached(model, tokens[1:], sizes), expected[1:]), name

    def test_engine(self):
        """Chunks, a prefix cache and other requests change no bit of a log-probability."""
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        options = AbsorbedMLAOptions(batch_invariant=True)
        fields = generating_fields(PARITY, init_method_std=0.4)
        model = generating_model(options, dtype=dtype, **fields).eval()
        found = by_dynamic_context(model, PROMPTS, NUM_TOKENS, **CROWDED)
        for prompt, one in zip(PROMPTS[:3], found):
            [alone] = by_forwards(model, [prompt], NUM_TOKENS)
            assert (one.tokens, one.log_probs) == (alone.tokens, alone.log_probs)
