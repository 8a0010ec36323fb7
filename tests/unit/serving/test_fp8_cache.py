"""The engine over a latent cache in FP8; ``test_engine.py`` has its tokens, too."""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.config import KVCacheManagementMode

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, all_block_bytes
from tests.support.cases import TINY
from tests.support.engine import (
    CHUNKED,
    Request,
    add,
    assert_generates,
    by_whole_forwards,
    engine_of,
    generate,
    generating_model,
    prompt,
    step_to_the_end,
)
from tests.support.refusal import refusal

FP8 = AbsorbedMLAOptions(latent_cache_dtype="fp8", train_on_cached_latents=True)
MIXED = [Request(prompt(length, seed), 6) for seed, length in enumerate((1, 64, 65, 130))]
ALONE = [Request(prompt(100), 6)]
OFFLOAD = {"inference_config": {"kv_cache_management_mode": KVCacheManagementMode.OFFLOAD}}


@pytest.fixture(scope="module")
def model():
    return generating_model(FP8)


def test_steps_of_graphs_sizes(model):
    run = generate(engine_of(model, **CHUNKED, num_cuda_graphs=4), MIXED, log_probs=True)
    assert run.statistics.graph_steps == run.statistics.steps
    assert_generates(run, by_whole_forwards(model, MIXED))


def test_the_cache_is_rounded(model):
    """Otherwise the tests above would not see that it is one in FP8."""
    plain = generating_model()
    plain.load_state_dict(model.state_dict())
    found, exact = (by_whole_forwards(each, MIXED[-1:])[0] for each in (model, plain))
    assert abs(found.log_probs[0] - exact.log_probs[0]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_counted_in_rows_of_fp8(dtype):
    """What the engine allocates is what its sizes are counted with."""
    model = generating_model(FP8, dtype=dtype)
    memory = engine_of(model, blocks=10).host.context.memory_buffer
    assert memory.shape[:3] == (2, 11, BLOCK_SIZE)
    assert memory.nbytes == 11 * all_block_bytes(model) == 11 * 2 * BLOCK_SIZE * 48


def test_resident_tokens_of_deepseeks_widths():
    """At least 1.6 times as many in the same memory."""
    wide = replace(TINY, kv_lora_rank=512, rope=64)
    sizes = [
        all_block_bytes(generating_model(options, mla=wide, dtype=torch.bfloat16, num_layers=1))
        for options in (None, FP8)
    ]
    assert sizes == [1152 * BLOCK_SIZE, 656 * BLOCK_SIZE] and sizes[0] > 1.6 * sizes[1]


def test_suspended_and_resumed(model, monkeypatch):
    """Megatron keeps a suspended cache in host memory, byte by byte."""
    # There is nothing to pin for without a GPU.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    engine = engine_of(model, **OFFLOAD)
    context = engine.host.context
    with engine:
        add(engine, ALONE)
        engine.step()
        before = context.memory_buffer.clone()
        context.deallocate_inference_state_buffers()
        assert not context.memory_buffer.untyped_storage().size()
        context.reinitialize_inference_state_buffers()
        assert torch.equal(context.memory_buffer.view(torch.uint8), before.view(torch.uint8))
        [found] = step_to_the_end(engine)
    assert found.tokens == generate(engine_of(model), ALONE).tokens[0]


def test_layers_that_differ(model, monkeypatch):
    monkeypatch.setattr(model.decoder.layers[1].self_attention, "options", AbsorbedMLAOptions())
    with refusal("latent_cache_dtype must be the same in all layers", "fp8, model"):
        engine_of(model)
