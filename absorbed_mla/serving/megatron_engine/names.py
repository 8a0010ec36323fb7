"""Private names of Megatron's inference engine, by the feature that needs them.

The check of the whole table is one of the first things that an ``Engine`` does.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.inference.engines import DynamicInferenceEngine

from absorbed_mla.megatron_names import (
    ALLOCATOR,
    CONTEXT,
    REFUSED,
    UNTIL_0_19,
    MegatronName,
    Need,
    names,
)

_INFERENCE = "megatron.core.inference"
ENGINE = f"{_INFERENCE}.engines.dynamic_engine.DynamicInferenceEngine"
CONTROLLERS = f"{_INFERENCE}.text_generation_controllers.text_generation_controller"
CONTROLLER = f"{CONTROLLERS}.TextGenerationController"
VIEW = f"{_INFERENCE}.contexts.gpu_view.ContextGPUView"
MLP = "megatron.core.transformer.mlp.MLP"
LAYER = "megatron.core.transformer.transformer_layer.TransformerLayer"

# Engine
SAMPLER = MegatronName(CONTROLLER, "_sampling", "this package's")
DETOKENIZE = MegatronName(CONTROLLER, "detokenize", "no text")
STOP_WORDS = MegatronName(
    ENGINE,
    "_check_stop_words_for_request_post_append",
    "the first stop token, with drafts; the end of a grammar",
)
# Context
RESUME = MegatronName(CONTEXT, "resume_paused_requests", "counts cached blocks as free")
EVICT_PAUSED = MegatronName(CONTEXT, "evict_overflow_paused_requests", "until one can run")
UPDATE_REQUESTS = MegatronName(CONTEXT, "update_requests", "then places drafts")
RELEASE_REQUESTS = MegatronName(
    CONTEXT,
    "release_memory_blocks_from_request_indexes",
    "registers generated blocks, and keeps records of tokens, first",
)
CHECK_AVAILABILITY = MegatronName(CONTEXT, "check_availability", "reads the folder first")
FIND_CACHED = MegatronName(CONTEXT, "_find_kv_match_count", "behind the request's own cached ones")
# Allocator
REGISTER = MegatronName(ALLOCATOR, "register_kv_block_hashes", "one block of a hash")
EVICTABLE = MegatronName(ALLOCATOR, "get_evictable_block_count", "none before one in use")
PARENTS = MegatronName(ALLOCATOR, "block_parent_id", versions=UNTIL_0_19)
RELEASE = MegatronName(ALLOCATOR, "release_memory_blocks", "counts each request, on branch dev")
EVICT_CACHED = MegatronName(ALLOCATOR, "evict_lru_blocks", "evicts several together")
DEREGISTER = MegatronName(ALLOCATOR, "_deregister_blocks", "writes the folder first")
ACTIVE_COUNT = MegatronName(ALLOCATOR, "active_count", versions=UNTIL_0_19)
POOL = (
    MegatronName(ALLOCATOR, "total_count", versions=UNTIL_0_19, or_else="pool_size"),
    MegatronName(ALLOCATOR, "total_avail", versions=UNTIL_0_19, or_else="pool_avail"),
)
# Controller
PREPARE_STEP = MegatronName(CONTROLLER, "_dynamic_step_context_init", "pads prefills to graphs")
RUN_MODEL = MegatronName(CONTROLLER, "_dynamic_step_forward_logits", "graphs of prefills")
KERNELS_OF_DRAFTS = (
    MegatronName(CONTROLLERS, "verify_speculative_tokens", "Megatron's in PyTorch"),
    MegatronName(CONTROLLERS, "prepare_next_forward_pass", "Megatron's in PyTorch"),
)
# Layers
SUMS_OF_LAYERS = (
    MegatronName(LAYER, "self_attn_bda", "a sum with the norm behind it"),
    MegatronName(LAYER, "mlp_bda", "a sum with the norm behind it"),
)

LAYER_GRAPHS = MegatronName(LAYER, "cudagraph_manager", "nothing, in a full graph")
ACTIVATION = MegatronName(MLP, "activation_func", "SwiGLU in one kernel")

ANY_ENGINE = Need(
    "Engine",
    REFUSED,
    (
        SAMPLER,
        RESUME,
        EVICT_PAUSED,
        *POOL,
        *names(
            ENGINE,
            "_add_request _prefix_cache_blocks_matched context controller evicted_request_count "
            "failed_request_ids has_unfinished_requests requests reset step_modern "
            "stop_word_finished_request_ids waiting_request_ids",
        ),
        *names(
            CONTEXT,
            "active_attn_metadata batch_dimensions block_size_tokens cache_mla_latent "
            "chunked_prefill_request_id cu_kv_lengths cu_query_lengths enable_prefix_caching "
            "get_index_of_chunked_prefill_request gpu_view has_unfinished_requests "
            "is_static_batching key_value_cache kv_block_allocator max_requests "
            "max_sequence_length max_tokens memory_buffer num_speculative_tokens "
            "padded_active_token_count paused_request_count request_ids request_kv_block_counts "
            "request_kv_length_offsets request_last_kv_block_id request_last_kv_block_offset "
            "request_query_lengths request_to_kv_block_ids step_count total_request_count "
            "using_cuda_graph_this_step",
        ),
        *names(
            ALLOCATOR,
            "allocate_memory_blocks block_bag dummy_block_idx enable_prefix_caching "
            "is_memory_available",
        ),
        *names(
            VIEW,
            "token_to_block_idx token_to_local_position_within_kv_block "
            "token_to_position_in_request",
        ),
    ),
)
NO_TEXTS = Need("results without texts", "Megatron makes texts that nobody reads", (DETOKENIZE,))
RESUMING = Need(
    "resuming of paused requests with cached blocks",
    "Megatron's own rule resumes them; from 0.20 on it counts cached blocks",
    (ACTIVE_COUNT,),
)
PRIORITIES = Need(
    "scheduling_policy='priority'",
    REFUSED,
    (
        ACTIVE_COUNT,
        *names(CONTEXT, "_swap_book_keeping_tensors release_memory_blocks_from_request_indexes"),
    ),
)
PREFIX_CACHING = Need(
    "prefix_caching=True",
    REFUSED,
    (
        REGISTER,
        EVICTABLE,
        RELEASE,
        EVICT_CACHED,
        RELEASE_REQUESTS,
        FIND_CACHED,
        *names(
            ALLOCATOR,
            "block_hashes block_ref_counts kv_hash_to_block_id prefix_caching_eviction_policy",
        ),
    ),
)
EVICTABLE_BLOCKS = Need(
    "count of evictable blocks",
    "Megatron's, with cached blocks before one that is in use",
    (PARENTS,),
)
PREFIX_CACHE_DIR = Need(
    "prefix_cache_dir",
    REFUSED,
    (
        CHECK_AVAILABILITY,
        DEREGISTER,
        *names(CONTEXT, "is_hybrid_model params_dtype"),
    ),
)
DRAFTS = Need(
    "num_speculative_tokens",
    REFUSED,
    (
        STOP_WORDS,
        UPDATE_REQUESTS,
        *names(ENGINE, "_spec_tokens_accepted_per_pos _spec_tokens_proposed_per_pos"),
        *names(ENGINE, "num_speculative_tokens"),
        *names(
            CONTEXT,
            "active_token_count token_to_block_idx token_to_pos_ids token_to_request_idx",
        ),
    ),
)
TOKEN_RECORDS = Need(
    "enable_return_routed_experts and enable_return_indexer_topk",
    REFUSED,
    (RELEASE_REQUESTS, *names(CONTEXT, "round_up_tokens")),
)
STRUCTURED_OUTPUTS = Need("structured_outputs", REFUSED, (STOP_WORDS,))
DRAFTS_ON_CPUS = Need("num_speculative_tokens on a CPU", REFUSED, KERNELS_OF_DRAFTS)
OVERLAP_SCHEDULER = Need(
    "decode_loop=True",
    "Megatron's scheduler runs all steps",
    (
        ACTIVE_COUNT,
        STOP_WORDS,
        UPDATE_REQUESTS,
        PREPARE_STEP,
        RUN_MODEL,
        *names(
            ENGINE,
            "_can_schedule_chunked_prefill _can_schedule_non_chunked_prefill "
            "_cg_admission_gating_active _prefill_tokens_computed _prefill_tokens_skipped",
        ),
        *names(
            ENGINE,
            "_prefix_cache_hits _run_coroutine_sync async_bookkeep enable_chunked_prefill "
            "finished_request_count get_request logging_step_interval num_speculative_tokens "
            "schedule_waiting_requests state track_generated_token_events",
        ),
        *names(
            CONTEXT,
            "_bookkeeping_h2d_done_event _staging_real_token_count calculate_log_probs_tensors "
            "prefix_cache_prefill_computed_tokens prefix_cache_prefill_skipped_tokens",
        ),
        *names(
            CONTEXT,
            "_cpu_bookkeeping_buf _cpu_mha_block_table _cpu_mha_cu_kv_seq_lengths "
            "_cpu_mha_cu_query_seq_lengths _cpu_mha_kv_seq_lengths _cpu_mha_query_lengths "
            "_staging_request_in_prefill_status _staging_request_kv_length_offsets "
            "_staging_request_query_lengths _staging_temperature _staging_top_k _staging_top_p "
            "active_request_metadata active_token_count config cuda_graph_batch_dimensions_list "
            "current_input_and_position_ids is_hybrid_model moe_enable_routing_replay "
            "num_prefill_requests padded_active_request_count padded_batch_dimensions "
            "prefix_cache_blocks_matched prefix_cache_hits prefix_cache_lru_clock "
            "release_memory_blocks_from_request_indexes request_in_prefill_status_tensor "
            "request_metadata request_output_lengths round_up_tokens token_to_block_idx "
            "token_to_input_ids token_to_local_position_within_kv_block token_to_pos_ids "
            "token_to_position_in_request token_to_request_idx",
        ),
        *names(VIEW, "_buf mha_block_table token_to_input_ids"),
        *names(
            CONTROLLER,
            "_all_logits_cuda _dynamic_step_calculate_log_probs "
            "_dynamic_step_calculate_top_n_logprobs _dynamic_step_context_bookkeeping "
            "_dynamic_step_log_probs_bookkeeping _dynamic_step_sample_logits "
            "_sampled_tokens_cuda vocab_size",
        ),
    ),
)
FULL_CUDA_GRAPHS = Need("full CUDA graphs", "no CUDA graph holds a whole step", (LAYER_GRAPHS,))
FUSED_SWIGLU = Need("fused SwiGLU", "Megatron's MLPs compute it in three kernels", (ACTIVATION,))
FUSED_RESIDUALS = Need(
    "fused residuals", "Megatron's layers add and normalise in two kernels", SUMS_OF_LAYERS
)


def owners_of(engine: DynamicInferenceEngine) -> Mapping[str, object]:
    """By dotted path of its class, each object of Megatron's engine that is in the table."""
    context = engine.context
    return {
        ENGINE: engine,
        CONTROLLER: engine.controller,
        CONTEXT: context,
        ALLOCATOR: context.kv_block_allocator,
        VIEW: context.gpu_view,
    }
