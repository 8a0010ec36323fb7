"""The engine, ``LLM``, and experts."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "drafts_behind_a_stop_token": Mutation(
        "absorbed_mla/serving/megatron_engine/build.py",
        "        end_at_first_stop_token(host)\n",
        "        pass\n",
    ),
    "the_last_of_several_stop_tokens": Mutation(
        "absorbed_mla/serving/sampling/stop_tokens.py",
        "in enumerate(new):",
        "in reversed(list(enumerate(new))):",
    ),
    "norm_of_another_sum": Mutation(
        "absorbed_mla/serving/weights/fused_residuals.py", "made[0] is x and self", "self"
    ),
    "norm_of_another_run": Mutation(
        "absorbed_mla/serving/weights/fused_residuals.py", " and self._run is this_run()", ""
    ),
    "norms_whose_hooks_wait": Mutation(
        "absorbed_mla/norm.py",
        "        and not (norm._forward_hooks or norm._forward_pre_hooks)\n",
        "",
    ),
    "grouped_experts_places": Mutation(
        "absorbed_mla/serving/experts/permuted_tokens.py",
        "scatter_(0, choices, numbers[: len(choices)])",
        "scatter_(0, numbers[: len(choices)], choices)",
    ),
    "grouped_experts_ends": Mutation(
        "absorbed_mla/serving/experts/permuted_tokens.py",
        "right=True, out_int32=True",
        "out_int32=True",
    ),
    "grouped_experts_of_other_ranks": Mutation(
        "absorbed_mla/serving/experts/permuted_tokens.py",
        "masked_fill(others.unsqueeze(1), 0)",
        "clone()",
    ),
    "parity_experts_order_of_choices": Mutation(
        "absorbed_mla/serving/experts/permuted_tokens.py",
        "        if parity:\n",
        "        if False:\n",
    ),
    "parity_experts_routed_in_one_pass": Mutation(
        "absorbed_mla/serving/experts/router.py", " or is_enabled(self.weight.device)", ""
    ),
    "llm_chooses_megatrons_experts": Mutation(
        "absorbed_mla/serving/weights/load.py", "        **router_options(args),\n", ""
    ),
    "grouped_experts_forget_the_ranking": Mutation(
        "absorbed_mla/serving/experts/router.py",
        '{"group_score_topk": of_group, "norm_topk_prob": normalised}',
        '{"norm_topk_prob": normalised}',
    ),
    "kernel_ranks_groups_as_megatron": Mutation(
        "absorbed_mla/kernels/moe/choice.py",
        "(group_score_topk or topk // group_topk)",
        "(topk // group_topk)",
    ),
    "kernel_normalises_as_megatron": Mutation(
        "absorbed_mla/kernels/moe/choice.py",
        "if normalize is None else normalize",
        "if True else normalize",
    ),
    "parity_experts_keep_the_sign_of_zero": Mutation(
        "absorbed_mla/serving/experts/experts.py", "up.add_(0.0)", "up"
    ),
    "parity_mlps_round_once": Mutation(
        "absorbed_mla/serving/weights/load.py",
        "rounds_each_step=options.parity",
        "rounds_each_step=False",
    ),
    "parity_experts_of_several_ranks": Mutation(
        "absorbed_mla/serving/experts/layer.py", "    if ranks > 1:\n", "    if False:\n"
    ),
    "grouped_experts_unstacked": Mutation(
        "absorbed_mla/serving/experts/experts.py",
        "if not self._is_stacked(whole=False):",
        "if False:",
    ),
    "context_parallel_ranks_draw_tokens_each": Mutation(
        "absorbed_mla/serving/model_ranks.py",
        "        dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)",
        "        pass",
    ),
    "divided_ranks_pad_steps_alone": Mutation(
        "absorbed_mla/serving/megatron_engine/build.py",
        "use_mpu_process_groups(), ep=exchange.group)",
        "use_mpu_process_groups())",
    ),
    "front_forgets_what_was_generated": Mutation(
        "absorbed_mla/serving/executor/dp_load_balancer.py",
        "self._tokens[rank][number] += len(progress.tokens)",
        "pass",
    ),
    "seed_is_ignored": Mutation(
        "absorbed_mla/serving/sampling/sampler.py",
        "uniform(request.seed, position), *others",
        "uniform(0, position), *others",
    ),
    "filters_leave_no_token_that_crosses_top_p": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py",
        "before >= limit",
        "before + ordered > limit",
    ),
    "kernels_leave_ties_of_every_piece": Mutation(
        "absorbed_mla/kernels/sampling/inverse_cdf.py",
        "left = wanted - (cumsum(ties) - ties)",
        "left = wanted + ties - ties",
    ),
    "kernels_leave_a_token_less": Mutation(
        "absorbed_mla/kernels/sampling/thresholds.py",
        "goal - count_above,",
        "goal - count_above - 1,",
    ),
    "kernels_search_from_the_wrong_sum": Mutation(
        "absorbed_mla/kernels/sampling/thresholds.py",
        "all_tokens = above + wanted * weight",
        "all_tokens = above",
    ),
    "scheduler_keeps_the_order_of_rows": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "        self._move(behind + others, others + behind, order)",
        "        pass",
    ),
    "scheduler_moves_no_random_numbers": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py",
        "        self._random = [self._random[place] for place in former]\n",
        "",
    ),
    "scheduler_moves_no_records": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py", "running.reorder(order)", "pass"
    ),
    "scheduler_takes_blocks_that_are_not_there": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "fits = used + needed <= allocator.active_count\n        return bool(fits)",
        "return True",
    ),
    "scheduler_hides_new_blocks": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "= blocks.numpy()\n        self._table_changed = True",
        "= blocks.numpy()",
    ),
    "scheduler_attends_to_former_keys": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "lengths[:n] = positions + 1",
        "lengths[:n] = positions",
    ),
    "scheduler_admits_nobody": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "if not self._megatron_admits():",
        "if True:",
    ),
    "scheduler_admits_what_does_not_fit": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "if tokens + length > room:",
        "if False:",
    ),
    "scheduler_leaves_steps_empty": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "return count if tokens >= _FILLED * room else 0",
        "return count",
    ),
    "scheduler_fills_steps_that_others_wait_for": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "if shortens and total - self._cached(len(lengths)) > room:",
        "if False:",
    ),
    "scheduler_shortens_steps_by_a_few_that_wait": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "if shortens and total - self._cached(len(lengths)) > room:",
        "if shortens:",
    ),
    "scheduler_shortens_steps_of_cached_prompts": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "total - self._cached(len(lengths)) > room",
        "True",
    ),
    "top_log_probs_of_the_prompt": Mutation(
        "absorbed_mla/serving/request_results.py",
        'last_of(record, "generated_top_n_logprobs", len(result.tokens))',
        '_joined(record, "generated_top_n_logprobs")',
    ),
    "entries_of_chunks_after_an_eviction": Mutation(
        "absorbed_mla/serving/request_results.py",
        "entries[max(0, len(entries) - len(part.generated_tokens)) :]",
        "entries",
    ),
    "last_entries_of_one_part": Mutation(
        "absorbed_mla/serving/request_results.py",
        "[-missing:] + found\n",
        "[-missing:] + found\n        break\n",
    ),
    "log_probs_of_a_prompt_that_was_not_read": Mutation(
        "absorbed_mla/serving/request_results.py", "if len(found) >= count)", "if found)"
    ),
    "log_probs_of_what_follows_a_prompt": Mutation(
        "absorbed_mla/serving/request_results.py", "next((found[:count] for", "next((found for"
    ),
    "evicted_requests_forget_stop_tokens": Mutation(
        "absorbed_mla/serving/request_record.py",
        "        part.stop_word_ids = former.stop_word_ids\n",
        "",
    ),
    "stopped_and_evicted_in_one_step": Mutation(
        "absorbed_mla/serving/engine.py",
        "if not requests.to_abort and not host.stop_word_finished_request_ids:",
        "if not requests.to_abort:",
    ),
    "penalties_of_all_drafts": Mutation(
        "absorbed_mla/serving/sampling/sampler.py", "drafts[:j]) for j", "drafts) for j"
    ),
    "prompt_log_probs_of_cached_blocks": Mutation(
        "absorbed_mla/serving/engine.py",
        "self.host.requests[number].record[-1].precomputed_block_hashes = []",
        "pass",
    ),
    "top_log_probs_of_prompts_only": Mutation(
        "absorbed_mla/serving/sampling/parameters.py",
        "top_n_logprobs=max(self.logprobs or 0, self.prompt_logprobs or 0)",
        "top_n_logprobs=self.prompt_logprobs or 0",
    ),
    "length_beyond_the_context": Mutation(
        "absorbed_mla/serving/sampling/parameters.py",
        "min(self.max_tokens or max_new_tokens, max_new_tokens)",
        "self.max_tokens or max_new_tokens",
    ),
    "answers_fill_the_context_not_the_cache": Mutation(
        "absorbed_mla/serving/engine_options.py",
        "min(self.max_sequence_length, self.request_tokens - beyond) - length",
        "self.max_sequence_length - length",
    ),
    "scheduler_is_left_out_without_a_word": Mutation(
        "absorbed_mla/serving/scheduler/conditions.py",
        '        log_once(logger, f"{said}: {why}")\n',
        "        pass\n",
    ),
    "scheduler_needs_no_names": Mutation(
        "absorbed_mla/serving/scheduler/conditions.py",
        "    if missing := OVERLAP_SCHEDULER",
        "    if False and OVERLAP_SCHEDULER",
    ),
    "missing_names_raise_later": Mutation(
        "absorbed_mla/megatron_names.py",
        "        if missing := self.missing(owners):",
        '        if missing := "":',
    ),
    "scheduler_waits_where_all_end": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "if not needed:\n            return True",
        "if not kept:\n            return False",
    ),
    "cached_blocks_are_no_reserve": Mutation(
        "absorbed_mla/serving/megatron_engine/build.py",
        "        resume_with_cached_blocks(context)\n",
        "        pass\n",
    ),
    "evictions_one_by_one": Mutation(
        "absorbed_mla/serving/scheduler/free_blocks.py",
        "evict(max(count, min(together, cached)))",
        "evict(count)",
    ),
    "shared_blocks_count_for_each_request": Mutation(
        "absorbed_mla/serving/scheduler/free_blocks.py",
        "used += int((~in_use[blocks]).sum())",
        "used += len(blocks)",
    ),
    "evicting_one_request_is_enough": Mutation(
        "absorbed_mla/serving/scheduler/free_blocks.py",
        "    while evicted is not None and",
        "    while False and",
    ),
    "scheduler_stops_where_blocks_are_cached": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "allocator.is_memory_available(needed)",
        "allocator.total_avail >= needed",
    ),
    "scheduler_runs_a_step_of_nobody": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "before the output is processed.\n            return None\n",
        "before the output is processed.\n            pass\n",
    ),
    "scheduler_counts_the_last_step_twice": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "if over and self._batch.count:",
        "if over:",
    ),
    "scheduler_forgets_prefix_hits": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "        self._count_prefix_hits()\n",
        "",
    ),
    "scheduler_loses_others_that_wait": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "        engine.waiting_request_ids.extend(others)\n",
        "",
    ),
    "scheduler_keeps_prompts": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "        self._end_prefill()\n",
        "",
    ),
    "scheduler_keeps_the_size_of_a_prompt": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        "        if not self._decodes:\n            return False\n",
        "",
    ),
    "scheduler_draws_behind_the_first_token_of_a_prompt": Mutation(
        "absorbed_mla/serving/scheduler/input_batch.py",
        'found = of["request_kv_length_offsets"][:n] + of["request_query_lengths"][:n]',
        'found = of["request_kv_length_offsets"][:n] + 1',
    ),
    "scheduler_forgets_first_tokens": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "                _time_first_token(self._parts[number])",
        "                pass",
    ),
    "log_probs_that_others_asked_for": Mutation(
        "absorbed_mla/serving/request_results.py", "if sampling.logprobs is not None:", "if True:"
    ),
    "scheduler_overlooks_stop_words": Mutation(
        "absorbed_mla/serving/scheduler/requests.py",
        "            self._look_for_stop_words(number)",
        "            pass",
    ),
    "scheduler_takes_tokens_of_ended_requests": Mutation(
        "absorbed_mla/serving/scheduler/model_runner.py",
        "former, without_token = self.rows_of(before),",
        "former, without_token = set(),",
    ),
    "scheduler_keeps_rows_of_ended_requests": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "            step.rows_of(self._finished)\n            | step",
        "            step",
    ),
    "scheduler_reads_tokens_of_other_rows": Mutation(
        "absorbed_mla/serving/scheduler/model_runner.py",
        "sampled_tokens(self._controller).index_select(0, inputs))",
        "sampled_tokens(self._controller)[:count])",
    ),
    "scheduler_forgets_who_waits": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "        if finished:\n            self._waiting.retry()",
        "        if False:\n            self._waiting.retry()",
    ),
    "scheduler_keeps_the_size_of_a_step": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "if (finished or step.has_prefill) and not self._batch.has_size_for(size):",
        "if False:",
    ),
    "scheduler_draws_too_early_stop_tokens": Mutation(
        "absorbed_mla/serving/sampling/device_sampler.py",
        "(one.avoids_stop_tokens or one.params.changes_logits for",
        "(one.params.changes_logits for",
    ),
    "scheduler_forgets_the_clock": Mutation(
        "absorbed_mla/serving/scheduler/overlap_scheduler.py",
        "context.prefix_cache_lru_clock += 1",
        "pass",
    ),
    "prompts_in_graphs_whatever_they_attend_to": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "pairs_of(context) > self._most_pairs:",
        "False:",
    ),
    "prompts_in_graphs_without_their_context": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "(new * (cached + new / 2))",
        "(new * new / 2)",
    ),
    "prompts_in_graphs_of_paused_requests": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "slice(context.paused_request_count, context.total_request_count)\n    new =",
        "slice(0, context.total_request_count)\n    new =",
    ),
    "whole_prompts_of_paused_requests": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "slice(context.paused_request_count, context.total_request_count)\n    prompts =",
        "slice(0, context.total_request_count)\n    prompts =",
    ),
    "whole_prompts_with_something_cached": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "<= MOST_PROMPTS and whole and",
        "<= MOST_PROMPTS and",
    ),
    "more_whole_prompts_than_there_is_room_for": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py", "0 < count <= MOST_PROMPTS", "0 < count"
    ),
    "whole_prompts_before_rows_that_decode": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py", " and bool(prompts[last].all())", ""
    ),
    "whole_prompts_graph_for_any_rows": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "key = size, self._whole_prompts",
        "key = size, self._expands",
    ),
    "prompts_captured_with_rows_that_decode_behind": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "construct_graph_dimensions=rows",
        "construct_graph_dimensions=size",
    ),
    "prompts_captured_that_are_too_long": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py", " or not self._is_valid(rows):", ":"
    ),
    "failed_capture_leaves_requests": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "            finally:\n                self._context.reset()",
        "            finally:\n                pass",
    ),
    "other_rows_in_graphs_of_any_size": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "self._sizes if self._whole_prompts else self._absorbed",
        "self._sizes",
    ),
    "graphs_of_the_fastest_backend_only": Mutation(
        "absorbed_mla/inference/attention.py",
        "next((backend for backend in able if backend.reads_device_spans), None)",
        "able[0] if able[0].reads_device_spans else None",
    ),
    "no_graphs_before_traffic": Mutation(
        "absorbed_mla/serving/executor/local.py", "runner._wake(capture=True)", "runner.wake()"
    ),
    "whole_prompts_seen_in_later_steps": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "setattr(context, name, former)",
        "setattr(context, name, former or value)",
    ),
    "whole_prompts_attend_absorbed_too": Mutation(
        "absorbed_mla/inference/full_prefill.py",
        "one = rows.query_lengths == 1",
        "one = rows.query_lengths >= 1",
    ),
    "whole_prompts_not_rounded_to_fp8": Mutation(
        "absorbed_mla/inference/attention.py",
        "own = OwnKeys(prompts.spans), self.rounded(kv)",
        "own = OwnKeys(prompts.spans), kv",
    ),
    "padding_behind_prompts_not_written": Mutation(
        "absorbed_mla/core_attention/masks/device_spans.py",
        "count = torch.cat((self.lengths, first, length - last))",
        "count = torch.cat((self.lengths, first, 0 * last))",
    ),
    "tiles_of_device_spans_see_too_much": Mutation(
        "absorbed_mla/core_attention/masks/device_spans.py",
        "torch.where(query >= keys - 1, SEES_ALL, query)",
        "torch.where(query >= keys - 2, SEES_ALL, query)",
    ),
    "prompts_in_graphs_that_ranks_cannot_divide": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "min(round_up(count, tp), largest)",
        "count",
    ),
    "prompts_leave_their_sizes_to_decode_steps": Mutation(
        "absorbed_mla/serving/scheduler/prefill_graphs.py",
        "setattr(context, name, former)",
        "setattr(context, name, former and value)",
    ),
    "prompts_in_no_graphs_by_default": Mutation(
        "absorbed_mla/serving/executor/engine_options.py",
        "prefill_graph_tokens=chosen_tokens(model, sizes)",
        "prefill_graph_tokens=0",
    ),
    "stop_string_shown_too_early": Mutation(
        "absorbed_mla/serving/output_processor.py",
        "self._text[: len(self._text) - self._held_back()]",
        "self._text",
    ),
    "disconnected_client_goes_on": Mutation(
        "absorbed_mla/serving/server/service.py",
        "self._abort([self._names[i] for i in self._running])",
        "pass",
    ),
    "caller_aborts_twice": Mutation(
        "absorbed_mla/serving/server/service.py", "            self._running.clear()\n", ""
    ),
    "server_wakes_for_every_request": Mutation(
        "absorbed_mla/serving/server/service.py",
        "            _call(loop, _put_all, its)",
        "            for one in its:\n                _call(loop, _put_all, [one])",
    ),
    "stream_repeats_its_text": Mutation(
        "absorbed_mla/serving/server/protocol.py", "self._sent[index] = now", "pass"
    ),
    "nobody_hears_of_the_death": Mutation(
        "absorbed_mla/serving/server/service.py",
        "            self._on_death()\n",
        "",
    ),
    "any_key_opens": Mutation(
        "absorbed_mla/serving/server/app.py",
        """raise HTTPException(401, "the API key is missing or wrong")""",
        "pass",
    ),
    "block_registered_twice": Mutation(
        "absorbed_mla/serving/scheduler/block_pool.py",
        "if known[i] != value",
        "if True",
    ),
    "peer_hides_the_killed_rank": Mutation(
        "absorbed_mla/serving/executor/multiprocess.py",
        "        if ended:\n            self._die(ended[0])\n",
        "",
    ),
}
