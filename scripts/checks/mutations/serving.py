"""Serving: ``LLM``, engine, scheduler, sampling, server, weights."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
absorbed_mla/serving/async_llm.py
  streamed_tokens_go_on_to_grow: token_ids=one.token_ids[:count] -> token_ids=one.token_ids
absorbed_mla/serving/beam_search.py
  every_beam_that_ends_counts: in found[:width] -> in found
  a_beam_search_does_not_stop: if len(self.ended) == width and best <= -> if False and best <=
absorbed_mla/serving/chat_messages.py
  content_parts_as_python_has_them: return {**message, "content": "".join(map(_text_of, content))}
    -> return message
  variables_of_the_template_are_dropped: not in _NOT_HERE}, **variables} -> not in _NOT_HERE}}
absorbed_mla/serving/data_parallel_attention/dispatcher.py
  divided_experts_with_all_probabilities: probs[:, own[0] : own[-1] + 1].T -> probs[:, : len(own)].T
  padded_experts_summed_over_tokens: hidden_states.unflatten(0, (self.num_local_experts, -1)).sum(0)
    -> hidden_states.unflatten(0, (-1, self.num_local_experts)).sum(1)
absorbed_mla/serving/data_parallel_attention/exchange.py
  divided_tokens_keep_their_padding: torch.cat([part[:count] for part, count in zip(parts, counts)])
    -> parts.flatten(0, 1)[: sum(counts)]
  divided_vocabulary_in_the_order_of_tokens: found.transpose(0, 1).flatten(1)
    -> found.reshape(counts[self.rank], -1)
  divided_counts_wait_in_graphs: if this_run() is not None: -> if False:
  divided_vocabulary_rows_of_rank_0: [:, : counts[self.rank]] -> [:, : counts[0]]
absorbed_mla/serving/data_parallel_attention/mlp.py
  divided_mlp_summed_twice: last.explicit_expert_comm = True -> pass
  divided_shared_experts_summed_twice: leave_partial(self.shared_experts) -> pass
absorbed_mla/serving/data_parallel_attention/model.py
  divided_vocabulary_with_a_rest: if vocabulary % exchange.size: -> if False:
absorbed_mla/serving/data_parallel_attention/vocabulary.py
  divided_embedding_of_foreign_tokens: found = found.masked_fill(elsewhere.unsqueeze(-1), 0) -> pass
  divided_embedding_of_one_token_more: (ids >= end) -> (ids > end)
  divided_logits_of_as_many_tokens: self.exchange.counts(len(rows)) -> self.exchange.tokens
absorbed_mla/serving/engine.py
  salts_of_commands_are_lost: one.prompt, one.cache_salt, -> one.prompt, None,
  priorities_of_commands_are_lost: one.params, salt, one.priority) -> one.params, salt, 0)
  generated_blocks_not_with_a_folder: generated_blocks(self.host)
    -> generated_blocks(self.host) if self._stored is None else None
  stopped_and_evicted_in_one_step: to_abort and not host.stop_word_finished_request_ids -> to_abort
  results_of_servers_pile_up: self.results.pop(one.number) -> pass
  requests_are_not_checked: cache_salt, lora_request, priority), error)
    -> cache_salt, lora_request, priority))
  failed_requests_run_on: requests.to_abort |= requests.failures.numbers -> pass
  requests_begin_with_their_last_chunk: record.first_chunk = record.first_chunk or self._began
    -> pass
  first_tokens_do_not_tell_the_start: if self._requests.without_tokens: -> if False:
absorbed_mla/serving/engine_options.py
  no_token_is_left_to_draw: if lost.issuperset(sampling.allowed_token_ids): -> if False:
  answers_fill_the_context_not_the_cache:
    - return min(self.max_sequence_length, self.request_tokens - beyond)
    -> return self.max_sequence_length
absorbed_mla/serving/executor/dp_load_balancer.py
  front_loses_the_salt: return dataclasses.replace(command, params=params)
    -> return Add(command.prompt, params)
  front_forgets_what_was_generated: self._tokens[rank][number] += len(progress.tokens) -> pass
  vocabulary_for_the_first_rank: for own in sent: -> for own in sent[:1]:
absorbed_mla/serving/executor/engine_options.py
  prompts_in_no_graphs_by_default: chosen_tokens(model, sizes) -> 0
absorbed_mla/serving/executor/local.py
  no_graphs_before_traffic: runner._wake(capture=True) -> runner.wake()
  updates_leave_old_latents: is not None and not keep_cache: -> is not None and False:
absorbed_mla/serving/executor/multiprocess.py
  peer_hides_the_killed_rank: if ended:
    |            self._die(ended[0])
    ->
  errors_of_ended_ranks_are_lost: error = self._reported(other) -> error = None
  causes_of_ended_ranks_are_lost: (rank, *range(self._world)) -> (rank,)
absorbed_mla/serving/executor/worker.py
  heartbeat_stays_out: os.utime(1) -> pass
absorbed_mla/serving/experts/dispatcher.py
  grouped_experts_not_summed_over_ranks: if self._several: -> if self._divided:
absorbed_mla/serving/experts/experts.py
  parity_experts_keep_the_sign_of_zero: up.add_(0.0) -> up
  grouped_experts_unstacked: if not self._is_stacked(whole=False): -> if False:
  grouped_experts_without_a_clamp: "activation_func_clamp_value": (None,), ->
absorbed_mla/serving/experts/layer.py
  parity_experts_of_several_ranks: if ranks > 1: -> if False:
absorbed_mla/serving/experts/permuted_tokens.py
  grouped_experts_places: 0, choices, numbers[: len(choices)] -> 0, numbers[: len(choices)], choices
  grouped_experts_ends: right=True, out_int32=True -> out_int32=True
  grouped_experts_of_other_ranks: masked_fill(others.unsqueeze(1), 0) -> clone()
  parity_experts_order_of_choices: if parity: -> if False:
absorbed_mla/serving/experts/product.py
  parts_of_experts_summed_as_one: summed_product(rows, weight, number
    -> summed_product(rows, weight, 1
  grouped_experts_of_too_many_parts: if (tensor_parallel_parts or 1) > MOST_LEAVES: -> if False:
absorbed_mla/serving/experts/router.py
  generation_chooses_without_megatron: if self.options.chooses_experts: -> if True:
  parity_experts_routed_in_one_pass: or is_enabled(self.weight.device) ->
  grouped_experts_forget_the_ranking: {"group_score_topk": of_group, "norm_topk_prob": normalised}
    -> {"norm_topk_prob": normalised}
  grouped_experts_balanced_by_more_than_scores: if set(kinds) - _BY_SCORE: -> if False:
absorbed_mla/serving/export/agreement.py
  export_hides_errors_of_other_ranks: if message is not None: -> if False:
absorbed_mla/serving/export/iteration.py
  export_leaves_before_the_last_part: if left: -> if left > 1:
  export_rank_0_leaves_unseen: dist.get_rank() + 1] -> dist.get_rank()]
absorbed_mla/serving/export/live.py
  export_believes_the_config_about_mtp:
    - dataclasses.replace(config, mtp_layers=count_mtp_layers(weights))
    -> config
  export_of_another_router: refuse_another_function(config, args, _ANOTHER_FUNCTION) ->
  export_of_megatrons_router: fields.problems.extend(only_megatrons(found)) ->
  export_reads_the_scaling_of_layers_with_experts: name in LAYER_OPTIONS or isinstance -> isinstance
  export_reads_the_router_of_one_chunk: for chunk in chunks for m -> for chunk in chunks[:1] for m
  exported_activation: if config.activation_func is not F.silu: -> if False:
  export_heads_of_tied_models: not model.share_embeddings_and_output_weights -> True
  export_without_layer_options: (model) | options -> (model)
  export_unwraps_once: while not isinstance(inner, GPTModel) -> if not isinstance(inner, GPTModel)
  export_of_any_tensor: not in (Tensor, nn.Parameter) and not is_float8tensor(shard.data) -> is None
absorbed_mla/serving/export/resharding.py
  resharding_beyond_its_bytes: dtype.itemsize <= most: -> dtype.itemsize <= 2 * most:
  resharding_of_parameters_that_were: tuple((id(x), x.stride()) for x in weights) -> ()
absorbed_mla/serving/export/sender.py
  live_weights_of_parameters_that_were: if plan is None or not all(fits): -> if plan is None:
  buckets_part_an_attention: pair[0].split(".self_attn.")[0] -> pair[0]
absorbed_mla/serving/export/shards.py
  export_with_gradients: data = self.weight.detach() -> data = self.weight
  export_holds_memory: OwnShard(weight, shard.size -> OwnShard(weight.detach(), shard.size
absorbed_mla/serving/export/weights.py
  export_without_messages: if group.size() > 1 and device.type not in kinds: -> if False:
  export_reads_the_router_of_one_stage: one_of_each(found) -> one_of_each([layer_options(chunks)])
  export_scales_as_powers_of_two: return SCALE_FORMATS[0] if fp8 -> return SCALE_FORMATS[1] if fp8
absorbed_mla/serving/llm.py
  beams_without_their_salt: "cache_salt": search.cache_salt} -> "cache_salt": None}
  rows_of_a_matrix_are_one_prompt: and not getattr(prompts[0], "ndim", 0): -> :
absorbed_mla/serving/llm_engine.py
  prompts_of_any_encoder: if prompt.encoder is not self.prompt_encoder: -> if False:
  part_of_the_weights_generates: self._lacks_weights = message -> pass
  threads_run_steps_at_once: with interrupts_deferred(), self._lock: -> if True:
  one_thread_keeps_the_lock: with self._waiting: -> if True:
  first_call_to_end_puts_the_model_to_sleep: if self._woken_by_call and not self._calls:
    -> if self._woken_by_call:
  ctrl_c_within_a_step: if not in_main or -> if True or not in_main or
  ctrl_c_for_ever: if self.received is not None: -> if False:
  steps_take_outputs_of_calls: name not in requests.of_calls -> True
  calls_undo_wake: self._woken_by_call = False
    |            self._wake()
    -> self._wake()
  ctrl_c_loses_outputs_of_a_step:
    - requests.unclaimed = {one.request_id: one for one in grown} | requests.unclaimed
    -> pass
  ctrl_c_within_the_lock: with self._exclusively():
    |                grown = self._claim
    -> with self._lock:
    |                grown = self._claim
  ctrl_c_keeps_the_lock: self._held.release()
    |            raise
    -> pass
    |            raise
absorbed_mla/serving/llm_options.py
  options_stay_with_llm: if name in known} -> if name in ("max_requests", "seed")}
absorbed_mla/serving/megatron_engine/build.py
  drafts_behind_a_stop_token: end_at_first_stop_token(host) -> pass
  divided_ranks_pad_steps_alone: (), ep=exchange.group -> ()
  cached_blocks_are_no_reserve: resume_with_cached_blocks(context) -> pass
absorbed_mla/serving/model_ranks.py
  context_parallel_ranks_draw_tokens_each:
    - dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)
    -> pass
absorbed_mla/serving/option_flags.py
  flags_switch_on_what_is_on: {flag: not one.default, -> {flag: one.default,
absorbed_mla/serving/option_schema.py
  bounds_of_options_are_not_checked: not one.accepts(value) -> False
  needs_of_options_are_not_checked: if _in_use(self, name) else () -> if False else ()
  needs_by_the_engines_names_only: {one.of_engine or own: own for -> {own: own for
  infinity_is_a_number: and abs(value) < math.inf ->
  options_share_one_mapping: functools.partial(dict, default) -> lambda: default
absorbed_mla/serving/output_processor.py
  outputs_without_their_salt: prompt.cache_salt, prompt.lora_request, -> None, prompt.lora_request,
  outputs_without_their_adapter: prompt.lora_request, prompt.priority -> None, prompt.priority
  ended_requests_pile_up: del self._requests[output.request_id] -> pass
  stop_string_shown_too_early: - self._stop_strings.held_back -> - 0
  stop_strings_held_back_are_missed: return
    |            output
    -> pass
    |            output
  interrupted_requests_run_on: self.abort(name)
    |            self._requests.pop(name, None)
    -> self._requests.pop(name, None)
  requests_of_calls_are_left_for_steps: name not in self.of_calls for -> True for
  calls_report_what_they_aborted_to_steps: _aborted if one.request_id not in names -> _aborted
  calls_wait_for_what_sleep_has_aborted: items() if name in self.of_calls -> items() if False
  ids_are_given_twice: if not self._is_taken(one)) -> if True)
  ends_of_grammars_are_lengths: ("abort", "error", "stop") -> ("abort", "error")
absorbed_mla/serving/prefix_cache/fingerprint.py
  prefixes_of_other_options: *_options(model), place -> place
absorbed_mla/serving/prefix_cache/stored.py
  prefixes_in_flight_are_written: b in cached if not allocator.block_ref_counts[b] -> b in cached
  prefixes_of_other_tokens_are_written: if known.get(pair[0]) == pair[1]] -> ]
  loaded_prefixes_have_no_parents: missing[:done], parents[:done]) -> missing[:done], [0] * done)
  loaded_prefixes_begin_texts: if cached else [0, *missing] -> if False else [0, *missing]
absorbed_mla/serving/indexer_topk.py
  chosen_keys_of_one_token_less: token_to_position_in_request[tokens] + 1
    -> token_to_position_in_request[tokens]
absorbed_mla/serving/prompts.py
  empty_salts: 0 < len(salt) <= _LONGEST_SALT -> len(salt) <= _LONGEST_SALT
  long_salts: 0 < len(salt) <= _LONGEST_SALT -> 0 < len(salt)
  grammars_begin_with_the_output: reasoning_ends=ends -> reasoning_ends=()
  bad_words_alone_only: if behind[-len(alone) :] != alone: -> if False:
absorbed_mla/serving/token_records.py
  choices_of_blocks_that_were_released: if number in rows: -> if False:
  choices_are_never_forgotten: self._ended.add(number) -> pass
  choices_of_foreign_forwards: self._runs = kwargs.get("inference_context") is self._context
    -> self._runs = True
  choices_of_rank_0: found[sum(tokens[:rank]) :][: tokens[rank]] -> found[: tokens[rank]]
  choices_of_stages_backwards: parts.append(part) -> parts.insert(0, part)
absorbed_mla/serving/request_adapters.py
  blocks_shared_among_adapters: f"{digest} {first.cache_salt!r}" -> first.cache_salt or ""
  adapters_that_never_get_a_slot: and len(in_use) == self._slots.max_loras -> and True
absorbed_mla/serving/request_record.py
  evicted_requests_find_nothing: if part.enable_prefix_caching and -> if False and
  evicted_requests_lose_their_salt: part.block_size_tokens, self.cache_salt
    -> part.block_size_tokens, None
  salts_are_all_the_same: salt[: len(digest)] = tokens.new_tensor(list(digest)) -> pass
  salts_in_place_of_texts: block_size)[1:] -> block_size)[:-1]
  evicted_requests_forget_stop_tokens: part.stop_word_ids = former.stop_word_ids ->
absorbed_mla/serving/request_results.py
  top_log_probs_of_the_prompt: last_of(record, "generated_top_n_logprobs", len(result.tokens))
    -> _joined(record, "generated_top_n_logprobs")
  entries_of_chunks_after_an_eviction: [max(0, len(entries) - len(part.generated_tokens)) :] ->
  last_entries_of_one_part: [-missing:] + found
    -> [-missing:] + found
    |        break
  log_probs_of_a_prompt_that_was_not_read: if len(found) >= count) -> if found)
  log_probs_of_what_follows_a_prompt: next((found[:count] for -> next((found for
  log_probs_that_others_asked_for: if sampling.logprobs is not None: -> if True:
  drafts_that_are_wrong_fail_a_request: is not None and place < len(progress.tokens) -> is not None
  sampled_requests_pile_up: self._sampled.pop(number, None) -> pass
  whole_texts_end_in_the_context: grammar.completed_by(result.tokens) -> False
  failed_requests_keep_what_came_after: getattr(result, name)[:count] -> getattr(result, name)
absorbed_mla/serving/sampling/device_sampler.py
  filters_leave_no_token_that_crosses_top_p: before >= limit -> before + ordered > limit
  scheduler_moves_no_random_numbers: self._random = [self._random[place] for place in former] ->
  scheduler_draws_too_early_stop_tokens: one.avoids_stop_tokens or one.params -> one.params
  nan_draws_a_token:
    - tokens.where(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite(), -1)
    -> tokens
  top_p_leaves_a_token_too_many: before >= limit -> before > limit
  min_p_leaves_out_a_tie: ~(shares >= min_p) -> ~(shares > min_p)
absorbed_mla/serving/sampling/parameters.py
  top_log_probs_of_prompts_only: top_n_logprobs=max(self.logprobs or 0, self.prompt_logprobs or 0)
    -> top_n_logprobs=self.prompt_logprobs or 0
  length_beyond_the_context: min(self.max_tokens or max_new_tokens, max_new_tokens)
    -> self.max_tokens or max_new_tokens
absorbed_mla/serving/sampling/sampler.py
  seed_is_ignored: uniform(request.seed, position), *others -> uniform(0, position), *others
  penalties_of_all_drafts: drafts[:j]) for j -> drafts) for j
  biases_that_only_some_tokens_have_for_all: [*biases.values()] -> [1.0] * len(biases)
  bad_words_behind_anything: if row.follows(word[:-1]) -> if True
  bad_words_without_drafts: *self.drafts] -> ]
  sampler_takes_no_notice_of_failures: if missing is not None and missing.any(): -> if False:
  drafts_without_the_grammars_drafts: [(i, row.request, row.drafts) for -> [(i, row.request, ()) for
absorbed_mla/serving/sampling/stop_tokens.py
  the_last_of_several_stop_tokens: in enumerate(new): -> in reversed(list(enumerate(new))):
  texts_go_on_behind_their_ends: if beyond: -> if False:
absorbed_mla/serving/scheduler/cached_blocks.py
  block_registered_twice: if one not in cached and ( -> if (
  block_without_the_one_before_it: parent in cached or parent in new -> True
  evictable_before_one_in_use: above = parents[is_used & is_cached] -> above = parents[:0]
  chunk_finds_blocks_behind_others: if 0 < start <= len(hashes): -> if False:
  generated_blocks_are_not_kept: self._register(row) -> pass
  failed_requests_are_never_forgotten: known & set(numbers) -> set(numbers)
  generated_blocks_of_failed_requests: if record is None or failed or -> if record is None or
  generated_blocks_with_a_token_unread: request.generated_tokens[:-1] -> request.generated_tokens
  generated_blocks_have_no_parents: (blocks, hashes, [0, *hashes[:-1]]) -> (blocks, hashes)
  generated_blocks_without_their_salt: record.cache_salt) -> None)
  blocks_of_two_that_end_together_leak: release(rows) -> release(rows[:1])
absorbed_mla/serving/scheduler/cascade_attention.py
  groups_of_requests_that_were_computed_again: same.all() and -> True and
  graphs_read_tables_of_other_groups: if of is groups and sizes -> if of is not None or sizes
  blocks_in_use_are_shared: least = int(cached[rows].min()) -> least = table.shape[1]
absorbed_mla/serving/scheduler/conditions.py
  scheduler_is_left_out_without_a_word: log_once(logger, f"{said}: {why}") -> pass
  scheduler_needs_no_names: if missing := OVERLAP_SCHEDULER -> if False and OVERLAP_SCHEDULER
absorbed_mla/serving/scheduler/cuda_graphs.py
  megatrons_graphs_of_prompts: not (pads_experts or whole_prefills) -> not pads_experts
absorbed_mla/serving/scheduler/free_blocks.py
  evictions_one_by_one: evict(max(count, min(together, cached))) -> evict(count)
  evictions_of_blocks_in_use: return count <= cached and -> return
  shared_blocks_count_for_each_request: used += int((~in_use[blocks]).sum()) -> used += len(blocks)
  evicting_one_request_is_enough: while evicted is not None and -> while False and
absorbed_mla/serving/scheduler/full_cuda_graphs.py
  graphs_of_buffers_that_move: (*self._model.parameters(), *self._model.buffers())
    -> tuple(self._model.parameters())
  graphs_of_another_contexts_tables:
    - buffers = context.memory_buffer.data_ptr(), device_tables(context).data_ptr()
    -> buffers = (context.memory_buffer.data_ptr(),)
absorbed_mla/serving/scheduler/input_batch.py
  scheduler_keeps_the_order_of_rows: self._move(behind + others, others + behind, order) -> pass
  scheduler_takes_blocks_that_are_not_there: fits = used + needed <= allocator.active_count
    |        return bool(fits)
    -> return True
  scheduler_hides_new_blocks: = blocks.numpy()
    |        self._table_changed = True
    -> = blocks.numpy()
  scheduler_attends_to_former_keys: lengths[:n] = positions + 1 -> lengths[:n] = positions
  scheduler_waits_where_all_end: if not needed:
    |            return True
    -> if not kept:
    |            return False
  scheduler_stops_where_blocks_are_cached: is_memory_available(needed) -> total_avail >= needed
  scheduler_keeps_prompts: self._end_prefill() ->
  scheduler_keeps_the_size_of_a_prompt: if not self._decodes:
    |            return False
    ->
  scheduler_draws_behind_the_first_token_of_a_prompt:
    - found = of["request_kv_length_offsets"][:n] + of["request_query_lengths"][:n]
    -> found = of["request_kv_length_offsets"][:n] + 1
absorbed_mla/serving/scheduler/model_runner.py
  scheduler_takes_tokens_of_ended_requests: self.rows_of(before), -> set(),
  scheduler_reads_tokens_of_other_rows: sampled_tokens(self._controller).index_select(0, inputs))
    -> sampled_tokens(self._controller)[:count])
  failures_of_the_step_after: self._tokens[:count].masked_fill_(missing[0], -1) ->
  masks_before_the_tokens_are_known: if not (ahead and constrained): -> if True:
  graphs_draw_without_masks: self._sampling_in_graphs and not constrained
    -> self._sampling_in_graphs
absorbed_mla/serving/scheduler/overlap_scheduler.py
  generated_blocks_of_requests_in_flight: self.generated.keep(records[-1]) -> pass
  scheduler_moves_no_records: running.reorder(order) -> pass
  scheduler_runs_a_step_of_nobody: before the output is processed.
    |            return None
    -> before the output is processed.
    |            pass
  scheduler_counts_the_last_step_twice: if over and self._batch.count: -> if over:
  scheduler_keeps_rows_of_ended_requests: step.rows_of(self._finished)
    |            | step
    -> step
  scheduler_forgets_who_waits: if finished: -> if False:
  scheduler_keeps_the_size_of_a_step:
    - if (finished or step.has_prefill) and not self._batch.has_size_for(size):
    -> if False:
  scheduler_forgets_the_clock: context.prefix_cache_lru_clock += 1 -> pass
  loop_takes_no_notice_of_failures: if token < 0 -> if False
absorbed_mla/serving/scheduler/prefill_graphs.py
  prompts_in_graphs_whatever_they_attend_to: pairs_of(context) > self._most_pairs: -> False:
  prompts_in_graphs_without_their_context: (new * (cached + new / 2)) -> (new * new / 2)
  prompts_in_graphs_of_paused_requests:
    - slice(context.paused_request_count, context.total_request_count)
    |    new =
    -> slice(0, context.total_request_count)
    |    new =
  whole_prompts_of_paused_requests: slice(context.paused_request_count, context.total_request_count)
    |    prompts =
    -> slice(0, context.total_request_count)
    |    prompts =
  whole_prompts_with_something_cached: <= MOST_PROMPTS and whole and -> <= MOST_PROMPTS and
  more_whole_prompts_than_there_is_room_for: 0 < count <= MOST_PROMPTS -> 0 < count
  whole_prompts_before_rows_that_decode: and bool(prompts[last].all()) ->
  whole_prompts_graph_for_any_rows: key = size, self._whole_prompts -> key = size, self._expands
  prompts_captured_with_rows_that_decode_behind: construct_graph_dimensions=rows
    -> construct_graph_dimensions=size
  prompts_captured_that_are_too_long: or not self._is_valid(rows): -> :
  failed_capture_leaves_requests: self._context.reset() -> pass
  other_rows_in_graphs_of_any_size: _sizes if self._whole_prompts else self._absorbed -> _sizes
  whole_prompts_seen_in_later_steps: (context, name, former) -> (context, name, former or value)
  prompts_in_graphs_that_ranks_cannot_divide: min(round_up(count, tp), largest) -> count
  prompts_leave_their_sizes_to_decode_steps: name, former -> name, former and value
  prefill_graphs_of_many_sizes: count += max(_LEAST_STEP, power // 8) -> count += power // 8
  prefill_graphs_beyond_a_step: return min(most, options.step_tokens) -> return most
absorbed_mla/serving/scheduler/priorities.py
  paused_requests_are_evicted_only: EVICT_PAUSED.replace(self._context, self._evict) -> pass
  rows_of_evicted_requests_are_counted: self._evicted_active += 1 -> pass
  evicted_requests_come_first: if moved or not self._is_sorted: -> if moved:
  a_chunk_waits_behind_others: return not reads, -> return False,
absorbed_mla/serving/scheduler/requests.py
  prompt_log_probs_of_cached_blocks: entry.record[-1].precomputed_block_hashes = [] -> pass
  requests_without_their_salt: block_hashes(tokens, size, cache_salt)
    -> block_hashes(tokens, size, None)
  records_without_their_salt: entry.record.priority = cache_salt, priority
    -> entry.record.priority = None, priority
  scheduler_admits_nobody: if not self._megatron_admits(): -> if True:
  scheduler_admits_what_does_not_fit: if tokens + length > room: -> if False:
  scheduler_leaves_steps_empty: return count if tokens >= _FILLED * room else 0 -> return count
  scheduler_fills_steps_that_others_wait_for:
    - if shortens and total - self._cached(len(lengths)) > room:
    -> if False:
  scheduler_shortens_steps_by_a_few_that_wait:
    - if shortens and total - self._cached(len(lengths)) > room:
    -> if shortens:
  scheduler_shortens_steps_of_cached_prompts: total - self._cached(len(lengths)) > room -> True
  scheduler_forgets_prefix_hits: self._count_prefix_hits() ->
  scheduler_loses_others_that_wait: engine.waiting_request_ids.extend(others) ->
  scheduler_forgets_first_tokens: _time_first_token(self._parts[number]) -> pass
  scheduler_overlooks_stop_words: self._look_for_stop_words(number) -> pass
  grammars_do_not_end_requests: part.stop_word_ids or sampled.grammar is not None
    -> part.stop_word_ids
absorbed_mla/serving/server/app.py
  clients_ids_are_not_told: given or uuid.uuid4().hex -> uuid.uuid4().hex
  slashes_are_not_taken: path = scope["path"].rstrip("/") or "/" -> path = scope["path"]
  any_key_opens: raise HTTPException(401, "the API key is missing or wrong") -> pass
  a_failure_is_an_answer: require_no_failure(done) ->
absorbed_mla/serving/server/chat_answer.py
  calls_end_as_texts: return "tool_calls" if calls and -> return "tool_calls" if False and
  held_back_text_is_sent_as_nothing: if before and not is_news: -> if False:
absorbed_mla/serving/server/chat_request.py
  chats_without_their_salt: self.salted(self.token_ids(llm)) -> self.token_ids(llm)
  special_marks_are_left_out: fields["skip_special_tokens"] = False -> pass
  several_calls_where_one_is_asked_for: None if self.parallel_tool_calls else 1, -> None,
absorbed_mla/serving/server/forced_calls.py
  braces_in_strings_end_arguments: self._in_string = True -> pass
absorbed_mla/serving/server/http_server.py
  new_requests_find_no_server: while self.server_state.tasks and -> while False and
absorbed_mla/serving/server/limits.py
  refusals_are_not_counted:
    - self._count(status)
    |            body =
    -> body =
  what_is_no_http_is_not_counted: self._count(400) -> pass
absorbed_mla/serving/server/logprobs.py
  log_probs_of_one_text_hide_each_other: name is None or name in names else -> name is None else
  chat_bytes_of_the_text: list(one.token_bytes), -> list((one.decoded_token or "").encode()),
  nan_in_json: if math.isnan(one.logprob): -> if False:
  offsets_count_bytes: self._length += len(added) -> self._length += len(one.token_bytes or b"")
absorbed_mla/serving/server/logs.py
  log_has_no_fields_of_requests: found |= getattr(record, "fields", {}) -> pass
absorbed_mla/serving/server/metrics.py
  gaps_of_all_outputs_together: (now - lasts[i]) / new] -> (now - lasts[i]) / new * len(counts)]
  tokens_of_one_output: self._generated += new -> self._generated += new * (i == 0)
  prompts_of_every_step: if is_first and any(counts): -> if any(counts):
  queue_ends_with_the_request: = begun - running.began -> = now - running.began
  refused_requests_are_counted_twice: if "refused" not in state: -> if True:
  mistakes_of_the_server_are_not_counted: count(500) -> pass
  outputs_that_the_end_cuts_are_not_counted: [reason] += len(running.counts) -> [reason] += 0
  reasons_begin_with_an_output: Counter(dict.fromkeys(_REASONS, 0)) -> Counter()
absorbed_mla/serving/server/message_parts.py
  marks_in_two_pieces_are_text: if any(mark.startswith(text[begin:]) -> if any(False
  calls_beyond_one_are_shown: if self._most_calls is not None: -> if False:
  hidden_reasoning_is_shown: if not self._with_reasoning: -> if False:
absorbed_mla/serving/server/protocol.py
  completions_without_their_salt: return self.salted(tokens) -> return tokens
  tokens_behind_an_echo_alone: isinstance(body, CompletionRequest) and body.max_tokens == 0 -> False
  log_probs_of_an_echo_alone: [first, *of_prompt, *logprobs] -> [first, *logprobs]
  stream_repeats_its_text: self._sent[index] = now -> pass
  parameters_of_json_are_dropped: {name: getattr(self, name) for name in SAMPLING_FIELDS} -> {}
  numbers_are_made_of_texts: ConfigDict(extra="forbid", strict=True) -> ConfigDict(extra="forbid")
absorbed_mla/serving/server/reasoning.py
  thinking_that_the_template_began: if prompt_end.endswith(BEGIN): -> if False:
  thinking_ends_at_its_mark_alone: self._ends = (END, *format.also_ends) -> self._ends = (END,)
  the_mark_is_thought: end = place + len(mark) if mark in self._left_out else place -> end = place
absorbed_mla/serving/server/response_format.py
  two_formats_together: if len(asked) > 1: -> if False:
  a_schema_without_its_type: if (self.json_schema is not None) != (self.type == "json_schema"):
    -> if False:
absorbed_mla/serving/server/request_stream.py
  log_takes_refused_requests_for_aborted: "abort" if self.error is None -> "abort" if True
  disconnected_client_goes_on: self._abort([self._names[i] for i in self._running]) -> pass
  caller_aborts_twice: self._running.clear() ->
  server_wakes_for_every_request: _call(loop, _put_all, its)
    -> for one in its:
    |            _call(loop, _put_all, [one])
absorbed_mla/serving/server/responses_answer.py
  an_items_end_is_not_told: yield from self._end("completed") -> self._open = None
  a_cut_response_is_complete: if now.finish_reason == "stop" else "incomplete" -> if True else ""
absorbed_mla/serving/server/responses_request.py
  thoughts_and_calls_are_messages_apart: if last is None or len(last.keys() &
    -> if True or len({} and
absorbed_mla/serving/server/service.py
  an_aborted_stream_never_ends: partial(_abort_all, names=names)
    -> lambda llm: [(llm.abort(name), self._streams.pop(name, None)) for name in names]
  bytes_of_encoded_prompts_still_count: self._waiting_bytes -= size -> pass
  nobody_hears_of_the_death: self._on_death() ->
  paused_requests_run: self.llm.is_ready and not self._frozen -> self.llm.is_ready
absorbed_mla/serving/server/tool_calls.py
  spaces_in_front_of_calls_are_text: self._raw, self._spaces, self._is_empty = "", "", True
    -> self._raw, self._is_empty = "", True
  what_is_no_call_is_lost: found.content += self._spaces + self._raw -> pass
  texts_are_not_escaped: self._add(_dumped(text)[1:-1], found) -> self._add(text, found)
  calls_without_arguments_have_none: self._add("{}" * self._is_empty, found) -> pass
  schemas_types_are_not_looked_at: and _types(self._schema()) == {"string"} -> and False
  deep_json_stops_the_server: SyntaxError, MemoryError, RecursionError -> SyntaxError
absorbed_mla/serving/server/tool_parsers/kimi_k2.py
  kimis_calls_get_other_ids: return header, name -> return new_call_id(), name
absorbed_mla/serving/server/unsupported.py
  what_is_unsupported_is_dropped: value is not None and value not in same -> False
  zero_asks_for_nothing: if isinstance(one, bool) == isinstance(value, bool) -> if True
absorbed_mla/serving/structured_output/bitmask.py
  masks_of_the_first_rows: index = [row for row, *_ in rows] -> index = [*range(len(rows))]
absorbed_mla/serving/structured_output/grammar.py
  tokens_of_the_tokenizer_only: {"no_forcing": true} -> {"no_forcing": false}
  grammars_that_fail_at_once: _FIRST_TOKENS = 1.0, 3 -> _FIRST_TOKENS = 1.0, 0
  schemas_of_any_size: if count > MOST_CHARACTERS: -> if False:
  white_space_anyway: not params.disable_any_whitespace -> True
absorbed_mla/serving/structured_output/request_grammar.py
  drafts_of_reasoning_are_read: return drafts[len(drafts) - left :] -> return drafts
  one_token_ends_reasoning: token][-longest:] -> token][-1:]
  texts_end_anywhere: ends = self.bitmask.may_end(row) -> ends = True
  texts_end_by_stop_tokens_only: not self._failed and matcher.is_stopped() -> False
  drafts_stay_in_the_grammar: matcher.rollback(read) -> pass
  one_matcher_for_equal_grammars: compiled.result().deep_copy() -> compiled.result()
absorbed_mla/serving/structured_output/vocabulary.py
  special_tokens_are_text: b"" if token in without else find(token) -> find(token)
absorbed_mla/serving/statistics.py
  prefix_queries_are_misses: "prefix_queries": computed + found -> "prefix_queries": computed
absorbed_mla/serving/tokenizers/detokenizer.py
  bytes_shown_while_they_may_change: _LONGEST_WAIT = 64 -> _LONGEST_WAIT = 4
  long_runs_that_are_no_text_are_shown_as_text: self._is_text = _begins_text(data) -> pass
  a_prompts_half_character_is_forgotten: data = self._before + data -> pass
absorbed_mla/serving/tokenizers/folder.py
  tokenizer_code_runs_unasked: trust_remote_code=trust_remote_code -> trust_remote_code=True
  tokenizer_code_is_replaced: if code and not trust_remote_code: -> if False:
  processes_load_tokenizer_code_at_once: fcntl.flock(lock, fcntl.LOCK_EX) -> pass
absorbed_mla/serving/tokenizers/tiktoken_model.py
  kimis_words_are_merged: , ignore_merges=True ->
  kimis_chinese_is_cut_as_other_letters: _LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    -> _LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
absorbed_mla/serving/tokenizers/token_bytes.py
  numbers_without_a_token_end_a_run: not in left_out and self._exists(token) -> not in left_out
  added_tokens_are_names_of_bytes:
    - bytes(table[c] for c in name) if table.keys() >= set(name) else name.encode()
    -> bytes(table[c] for c in name if c in table)
  token_bytes_without_the_space_before: (twice[len(once) :] if twice.startswith(once) else once)
    -> once
absorbed_mla/serving/tokenizers/tokenizers.py
  templates_that_lack_tools_are_taken: if options.get("tools") and "tools" not in template:
    -> if False:
  templates_get_dicts_alone: except TypeError: -> except ZeroDivisionError:
absorbed_mla/serving/weights/fused_residuals.py
  norm_of_another_sum: made[0] is x and self -> self
  norm_of_another_run: and self._run is this_run() ->
absorbed_mla/serving/weights/index_weights.py
  index_weights_are_those_of_parity: if parity: -> if False:
absorbed_mla/serving/weights/checkpoint.py
  llm_forgets_follow_links: (folder, follow_links=follow_links) -> (folder)
  tokenizer_beside_the_blobs: return checkpoint.auxiliary_folder if checkpoint.auxiliary else None
    -> return min((p.parent for p in checkpoint.auxiliary.values()), default=None)
absorbed_mla/serving/weights/load.py
  llm_forgets_the_options_of_layers: **layer_options(args), ->
  parity_mlps_round_once: rounds_each_step=options.parity -> rounds_each_step=False
  index_weights_are_rounded: keep_head_weights(model, config, tensors, dtype, parity=options.parity)
    ->
absorbed_mla/serving/weights/update.py
  updates_of_any_dtype: if dtype not in DTYPES.values() -> if False
  updates_read_the_next_bucket: self._arrived[name] = self._arrived[name].clone() -> pass
"""
)
