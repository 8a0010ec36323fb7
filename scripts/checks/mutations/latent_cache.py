"""Memory for latents: in FP8, shared by ranks, in host memory."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "fp8_zeros_have_no_scale": Mutation(
        "absorbed_mla/fp8_latents.py",
        ".clamp(min=LEAST)",
        ".clamp(min=0.0)",
    ),
    "fp8_latents_have_no_gradient": Mutation(
        "absorbed_mla/fp8_latents.py",
        "        return grad, None",
        "        return torch.zeros_like(grad), None",
    ),
    "fp8_rows_of_other_alignment": Mutation(
        "absorbed_mla/fp8_latents.py",
        "_ALIGNMENT = 16",
        "_ALIGNMENT = 8",
    ),
    "fp8_scales_off_their_places": Mutation(
        "absorbed_mla/fp8_latents.py",
        "if self.kv_lora_rank % _SCALE_BYTES:",
        "if False:",
    ),
    "fp8_largest_of_positive_numbers": Mutation(
        "absorbed_mla/kernels/fp8_latents.py",
        "wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF",
        "wide.to(tl.int32, bitcast=True)",
    ),
    "fp8_decoded_by_the_first_scale": Mutation(
        "absorbed_mla/kernels/fp8_latents.py",
        "tl.load(scales_ptr + token * stride_scales + group,",
        "tl.load(scales_ptr + token * stride_scales,",
    ),
    "fp8_rows_without_k_rope": Mutation(
        "absorbed_mla/kernels/fp8_latents.py",
        "scales.shape[-1] + bool(rope))",
        "scales.shape[-1])",
    ),
    "fp8_scales_in_the_models_dtype": Mutation(
        "absorbed_mla/fp8_latents.py",
        "(wide * parts.scales[..., None])",
        "(wide * parts.scales.to(kv.dtype)[..., None])",
    ),
    "shared_cache_of_uneven_blocks": Mutation(
        "absorbed_mla/inference/decode_context_parallel/support.py",
        "if ranks < 2 or block_size % ranks:",
        "if ranks < 2:",
    ),
    "divided_prompt_pieces_at_one_place": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "before += own.stop - own.start",
        "before += 0",
    ),
    "few_prompt_tokens_divided": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "if tokens < LEAST_TOKENS or tokens %",
        "if tokens %",
    ),
    "shared_cache_rounds_the_longest_down": Mutation(
        "absorbed_mla/inference/decode_context_parallel/layout.py",
        "longest = -(-rows.max_kv_length // self.size)",
        "longest = rows.max_kv_length // self.size",
    ),
    "shared_cache_heads_of_all_ranks": Mutation(
        "absorbed_mla/inference/decode_context_parallel/layout.py",
        "_gather(x, self.heads).transpose",
        "_gather(x, self.group).transpose",
    ),
    "shared_cache_in_as_many_blocks": Mutation(
        "absorbed_mla/inference/decode_context_parallel/context.py",
        "None if size is None else size * ranks.size",
        "size",
    ),
    "shared_cache_gathered_by_rank": Mutation(
        "absorbed_mla/inference/decode_context_parallel/attention.py",
        "found.transpose(0, 1).flatten(0, 1)",
        "found.flatten(0, 1)",
    ),
    "windows_cut_one_block_early": Mutation(
        "absorbed_mla/inference/kv_offload/blocks.py",
        "if total + count > most:",
        "if total + count >= most:",
    ),
    "padding_leaves_the_device": Mutation(
        "absorbed_mla/inference/kv_offload/blocks.py",
        "torch.nonzero(on_device[:-1]).flatten()",
        "torch.nonzero(on_device).flatten()",
    ),
    "plan_of_blocks_before_they_moved": Mutation(
        "absorbed_mla/inference/kv_offload/blocks.py",
        "if moved or self._planned is None",
        "if self._planned is None",
    ),
    "buffer_filled_while_it_is_read": Mutation(
        "absorbed_mla/inference/kv_offload/staging_buffers.py",
        "len(self._buffers) - (self._taken is not None)",
        "len(self._buffers)",
    ),
    "staged_order_forgets_the_pass": Mutation(
        "absorbed_mla/inference/kv_offload/staging_buffers.py",
        "self._following = layer, self._pass, window",
        "self._following = layer, 0, window",
    ),
    "offloaded_tokens_from_the_end": Mutation(
        "absorbed_mla/inference/latent_memory.py",
        "room = max(0, min(len(kv), self.block_size - first))",
        "room = min(len(kv), self.block_size - first)",
    ),
    "loaded_blocks_are_not_moved": Mutation(
        "absorbed_mla/inference/kv_offload/blocks.py",
        "        self._filled[list(blocks)] = True\n",
        "",
    ),
    "shared_cache_of_tensor_parallel_ranks": Mutation(
        "absorbed_mla/inference/decode_context_parallel/context.py",
        'getattr(groups, "tp_cp", groups.tp)',
        "groups.tp",
    ),
    "tiers_plan_paused_requests": Mutation(
        "absorbed_mla/inference/kv_offload/context.py",
        "slice(self.paused_request_count, self.total_request_count)",
        "slice(0, self.total_request_count)",
    ),
}
