"""Options of the engine: what they refuse, and what Megatron gets of them."""

import pytest
from megatron.core.inference.config import PrefixCachingEvictionPolicy

from absorbed_mla.serving.engine_options import EngineOptions
from tests.support.engine import generating_model

SIZES = {"max_sequence_length": 100, "max_requests": 3}


HOST = {"host_cache_tokens": 640}
DISK = {"prefix_cache_dir": "somewhere"}
REF_ZERO = {
    "inference_config": {"prefix_caching_eviction_policy": PrefixCachingEvictionPolicy.REF_ZERO}
}
NEEDS_LRU = r"prefix_cache_dir needs inference_config prefix_caching_eviction_policy=.*LRU"
GRAPHS = {"num_cuda_graphs": 2, "prefill_graph_tokens": 64}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"max_sequence_length": 1}, "max_sequence_length must be an integer of at least 2, got 1"),
        ({"max_requests": 0}, "max_requests must be an integer of at least 1, got 0"),
        ({"cache_tokens": 63}, "cache_tokens must be an integer of at least 64, or None, got 63"),
        (
            {"cache_tokens": 128, "paused_cache_tokens": 128},
            "paused_cache_tokens must be at least 0 and a block less than the cache's 128, got 128",
        ),
        ({"decode_context_parallel": 2}, "must be one of False, True, got 2"),
        ({"host_cache_tokens": 63}, "host_cache_tokens must be an integer of at least 64, or 0"),
        ({**HOST, "num_cuda_graphs": 4}, "host_cache_tokens needs num_cuda_graphs=None, got 4"),
        ({**HOST, "decode_context_parallel": True}, "needs decode_context_parallel=False, got"),
        (
            {**HOST, "inference_config": {"unified_memory_level": 1}},
            "host_cache_tokens needs inference_config unified_memory_level=0, got 1",
        ),
        ({**DISK, "prefix_caching": False}, "prefix_cache_dir needs prefix_caching=True, got"),
        ({**DISK, "decode_context_parallel": True}, "needs decode_context_parallel=False, got"),
        ({**DISK, **REF_ZERO}, NEEDS_LRU),
        ({"prefix_cache_dir": "", **REF_ZERO}, NEEDS_LRU),
        ({**DISK, "prefix_cache_bytes": 0}, "prefix_cache_bytes must be an integer of at least 1"),
        ({**GRAPHS, "prefill_graph_tokens": 4096}, "from 0 to step_tokens 2048, got 4096"),
        ({**GRAPHS, "prefill_graph_tokens": -1}, "got -1"),
        ({**GRAPHS, "num_cuda_graphs": None}, "needs num_cuda_graphs, got None"),
        ({**GRAPHS, "decode_loop": False}, "needs decode_loop=True or None, got False"),
        ({**GRAPHS, "num_speculative_tokens": 1}, "needs num_speculative_tokens=0, got 1"),
        ({**GRAPHS, "decode_context_parallel": True}, "needs decode_context_parallel=False, got"),
    ],
)
def test_refused_options(changes, error):
    with pytest.raises(ValueError, match=error):
        EngineOptions(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("changes", "tp", "requests", "tokens", "blocks"),
    [
        ({}, 1, 3, 2048, 6),
        ({}, 2, 4, 2048, 6),
        ({"max_requests": 70, "step_tokens": 1}, 3, 72, 192, 140),
        ({"cache_tokens": 200}, 1, 3, 2048, 3),
        # Of the bytes of 6 and one more blocks, a rank has a part.
        ({"decode_context_parallel": True}, 4, 4, 2048, 7 / 4 - 1),
    ],
)
def test_sizes_of_megatron(changes, tp, requests, tokens, blocks):
    """Rounded to what the ranks divide; the cache has one more block, for padding."""
    config = generating_model(num_layers=1).config
    host = EngineOptions(**{**SIZES, **changes}).to_host(config, 5, tp)
    assert (host.max_requests, host.max_tokens) == (requests, tokens)
    width = config.kv_lora_rank + config.qk_pos_emb_head_dim
    assert host.buffer_size_gb * 2**30 == pytest.approx((blocks + 1) * 64 * 5 * width * 4)
