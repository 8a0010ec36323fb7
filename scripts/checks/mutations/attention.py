"""Core attention, caches, context parallelism, sparse attention."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
absorbed_mla/context_parallel/choice.py
  gathered_in_the_wrong_memory: keep and gathered <= own -> keep
  gathered_beyond_what_backward_holds: max(_MOST_GATHERED, 2 * item * own) -> _MOST_GATHERED
absorbed_mla/context_parallel/layout.py
  late_chunk_of_a_rank: return rank, 2 * self.cp_size - 1 - rank -> return rank, self.cp_size + rank
  positions_in_the_pack: self.tokens() - self.sequences.zeros().repeat_interleave(slots)
    -> self.tokens()
  prefixes_of_another_rank: self._local_runs(self.cp_rank), keys) -> self._local_runs(0), keys)
  padding_is_attended:
    - return _clamp(length - early * size, size), _clamp(length - late * size, size)
    -> return size, size
  ring_ignores_late_keys: size, late, first, every_key, None -> size, late, first, early_keys, None
  windows_of_a_ring_without_late_keys: for place in (0, 1)) -> for place in (0,))
  windows_of_a_ring_without_oldest_keys: before - window + 1) -> before - window + 2)
absorbed_mla/context_parallel/strategies/all_gather.py
  gradient_scaled_twice: return own -> return own / self.layout.cp_size
  index_keys_in_another_order:
    - return rank_major.index_select(0, self.layout.index("sequence_order", x.device))
    -> return rank_major
absorbed_mla/context_parallel/strategies/p2p.py
  gradient_stays_away: return own + transfer.received() -> return transfer.received() * 0 + own
  ring_passes_on_in_bf16: grad.add_(transfer.received())
    -> grad.bfloat16().add_(transfer.received()).to(grad.dtype)
  ring_ends_in_bf16: return own + transfer.received()
    -> return (own.bfloat16() + transfer.received().bfloat16()).to(own.dtype)
  ring_of_group_ranks: dist.get_global_rank(group, (rank + by) % size) -> (rank + by) % size
absorbed_mla/core_attention/backends/cudnn.py
  gradient_of_shared_keys: _joined((a, b, a not in seen) -> _joined((a, b, True)
absorbed_mla/core_attention/backends/flash_attention_4.py
  uncovered_keys: (torch.empty_like if full else torch.zeros_like)(x) -> torch.empty_like(x)
  uncovered_queries: torch.empty if rules.spans.cover(tokens) else torch.zeros -> torch.empty
  atomics_where_forbidden: torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED -> False
absorbed_mla/core_attention/cost.py
  form_without_backward: (3 * key + 2 * value) if work.training else 0 -> 0
absorbed_mla/core_attention/forms/expanded.py
  k_rope_gradient_of_one_head: extended[:, nope:, c:].diagonal -> extended[:1, nope:, c:].diagonal
  weight_gradient_slice: dw_k[:, :nope, :c] -> dw_k[:, rope:, :c]
  k_rope_of_another_token: = k_rope[:, None] -> = k_rope.roll(1, 0)[:, None]
  head_chunks_not_summed: dkv = part if dkv is None else dkv.add_(part) -> dkv = part
absorbed_mla/core_attention/invariant_hopper.py
  pieces_of_the_first_sequence: blocks = first_keys[:, None] +
    -> blocks = first_keys[:1, None] + 0 * first_keys[:, None] +
absorbed_mla/core_attention/masks/device_spans.py
  padding_behind_prompts_not_written: lengths, first, length - last -> lengths, first, 0 * last
  tiles_of_device_spans_see_too_much: query >= keys - 1, SEES_ALL, -> query >= keys - 2, SEES_ALL,
absorbed_mla/core_attention/masks/redundant.py
  mask_that_hides_a_prefix: (query < ends) & real -> (query < starts + lengths) & real
  masks_answer_for_other_queries: or known_queries is not queries: -> :
  mask_of_a_pack_that_hides_more: found |= (mask[:, :, rows] & seen).any() -> pass
  mask_of_a_pack_asked_of_earlier_bits: if tuple(known) != asked or -> if answer is None or
absorbed_mla/core_attention/masks/scores.py
  causal_offset: triu(chunk.causal_offset + 1) -> triu(chunk.causal_offset + 2)
  shared_dropout_seed: self.dropout_seed, -> torch.seed() % 2**62,
  sinks_of_the_first_heads: logits.narrow(0, self.first_head, heads) -> logits.narrow(0, 0, heads)
absorbed_mla/core_attention/masks/spans.py
  prefixes_across_padding: if found and found[-1][1] == start: -> if found:
  tiles_of_another_layout: made.tables = DerivedTables()
    -> made.tables = cls.shared = getattr(cls, 'shared', None) or DerivedTables()
absorbed_mla/core_attention/masks/tiles.py
  tile_offset: offset = offset + part * tokens -> offset = offset + part * (tokens - 1)
  window_of_too_few_keys: offset - window + 1).clamp -> offset - window + 2).clamp
  window_of_too_few_queries: - 1 - offset + window) -> - 2 - offset + window)
absorbed_mla/core_attention/masks/varlen.py
  varlen_alignment: span.key_start + queries + offset -> span.key_start + queries + offset + 1
absorbed_mla/core_attention/merge.py
  merge_weights: for x in (lse, part_lse)) -> for x in (lse, lse))
absorbed_mla/core_attention/module.py
  choice_of_another_layout: (layout, batch, cp_size, self.training -> (batch, cp_size, self.training
  parity_merges_prefixes: PathBackend(backend, layout.tree) if whole else ->
  packs_with_an_old_cudnn: layout.packed or (cp_size > 1 and batch == 1), -> False,
absorbed_mla/core_attention/path_keys.py
  selection_without_own_keys: span.causal_offset + base -> span.causal_offset
  gradients_of_copies_by_place: x.index_select(0, self.order) -> x
absorbed_mla/core_attention/selection.py
  slowest_form: form, chosen = min(found.able, -> form, chosen = max(found.able,
absorbed_mla/core_attention/shared_prefix.py
  deeper_prefixes_unseen: for level in levels: -> for level in levels[:1]:
  prefixes_without_a_gradient: total.add_(share) -> pass
  padding_sees_prefixes: upper.query_end != span.query_start -> False
absorbed_mla/core_attention/sink.py
  backward_beside_no_sink: (share[..., None]), total -> (share[..., None]), lse
  sink_of_all_ranks: [tp_group.rank()].clone() -> [0].clone()
  sink_gradient_of_the_lse_over_keys: torch.exp(sink.to(lse.dtype) - lse) * _delta
    -> torch.sigmoid(sink.to(lse.dtype) - lse) * _delta
absorbed_mla/core_attention/tiled_reference.py
  rows_off_cache_lines: return F.pad(x, (0, missing)) if missing else x -> return x
absorbed_mla/core_attention/window.py
  window_without_the_token: return before + 1 -> return before
  older_keys_have_no_gradient: total.add_(_turn(part)) -> pass
  window_mask_not_turned: mask = mask.flip((2, 3)) -> pass
  oldest_keys_of_a_window: seen = window - 1 - (own - newest) - (end - start)
    -> seen = window - (own - newest) - (end - start)
absorbed_mla/dsa/aux_loss.py
  indexer_without_a_loss_unseen: if held and torch.is_grad_enabled() -> if False
absorbed_mla/dsa/cached_attention.py
  fp8_holes_of_a_selection: (subset.indices < 0, -1) -> (subset.indices < 0, 0)
absorbed_mla/dsa/checkpoint_scope.py
  frozen_warm_up_not_refused: not scope.is_recomputed -> False
absorbed_mla/dsa/core_attention.py
  loss_of_own_rows: max(1, sum(plan.layout.sequence_lengths) * kv.shape[1])
    -> max(1, len(kv) * kv.shape[1])
  target_over_other_keys: lse if over_attended else None -> lse
  indexer_loss_of_mtp_in_the_decoders: place = decoder + min(place, mtp) -> pass
  mtp_shares_a_selection: self.dsa = replace(self.dsa, topk_freq=1) -> pass
absorbed_mla/dsa/backend_selector.py
  parity_without_a_choice: return not request.batch_invariant or bool( -> return True or bool(
absorbed_mla/dsa/index_sharing.py
  shared_selection_of_another_microbatch: self._shared().scope is not scope -> False
  recomputed_layer_chooses_again: self.shares or self.replayed is not None -> self.shares
absorbed_mla/dsa/indexer.py
  indexer_trains_the_model: x, q_latent = x.detach(), q_latent.detach() -> pass
  indexer_rope_pairing: transpose(-1, -2).flatten(-2) -> flatten(-2)
absorbed_mla/dsa/indexer_loss.py
  recall_of_one_head: probabilities(scores, lse).sum(1) -> probabilities(scores, lse).amax(1)
  indexer_gradient_of_some_ranks: *= self.factor * size -> *= self.factor
  gradient_of_shared_queries_once: score_grad *= count -> pass
  target_of_own_heads: dist.reduce(total, group=self.tp_group, group_dst=owner) -> pass
  index_key_gradients_in_bf16: zeros_like(key, dtype=weights.dtype) -> zeros_like(key, dtype=kept)
absorbed_mla/dsa/key_subset.py
  repeated_key_gradients: .index_add_(0, places -> .index_copy_(0, places
absorbed_mla/dsa/scores.py
  relu_gradient_at_zero: (products > 0) -> (products >= 0)
absorbed_mla/dsa/selection.py
  ties_of_the_selection: (ties.cumsum(-1, dtype=torch.int32) <= missing)
    -> (ties.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= missing)
  hidden_keys_are_ties: (scores == last) & seen -> scores == last
absorbed_mla/dsa/sequence_parallel.py
  index_rows_at_other_positions: x[rank * count : (rank + 1) * count] -> x[:count]
absorbed_mla/dsa/warm_up.py
  warm_up_moves_expert_biases: module.frozen_expert_bias = True -> pass
  recomputed_warm_up_stands_still: module.register_forward_hook(_with_gradient) -> pass
absorbed_mla/inference/attention.py
  graphs_of_the_fastest_backend_only:
    - next((backend for backend in able if backend.reads_device_spans), None)
    -> able[0] if able[0].reads_device_spans else None
  whole_prompts_not_rounded_to_fp8: (prompts.spans), self.rounded(kv) -> (prompts.spans), kv
absorbed_mla/inference/caches/dynamic.py
  rows_of_a_former_forward: or number != context.step_count -> or False
  cache_of_the_first_layer: context, layer_number - offset, tokens, -> context, 1, tokens,
absorbed_mla/inference/caches/static.py
  cache_written_one_late: self.offset, self.requests -> self.offset + 1, self.requests
  decoded_at_position_zero: self.offset, self.max_position, -> 0, self.max_position - self.offset,
  context_of_another_model: begun and last is not None and last() -> begun and last is None and last
absorbed_mla/inference/decode_context_parallel/attention.py
  shared_cache_gathered_from_rank_0: .roll(-(start % ranks.size), dims=0) ->
  shared_cache_gathered_by_rank: found.transpose(0, 1).flatten(0, 1) -> found.flatten(0, 1)
absorbed_mla/inference/decode_context_parallel/context.py
  shared_cache_memory: context.block_size_tokens = whole // context.cache_ranks.size -> pass
  shared_cache_in_as_many_blocks: None if size is None else size * ranks.size -> size
  shared_cache_of_tensor_parallel_ranks: getattr(groups, "tp_cp", groups.tp) -> groups.tp
absorbed_mla/inference/decode_context_parallel/layout.py
  shared_cache_owner_of_a_token: (self.size - 1 - self.rank) -> (self.size - 1)
  shared_cache_writes_all_tokens: torch.where(own, block, unused) -> block
  shared_cache_rounds_the_longest_down: longest = -(-rows.max_kv_length // self.size)
    -> longest = rows.max_kv_length // self.size
  shared_cache_heads_of_all_ranks: (x, self.heads).transpose -> (x, self.group).transpose
absorbed_mla/inference/decode_context_parallel/support.py
  shared_cache_of_uneven_blocks: if ranks < 2 or block_size % ranks: -> if ranks < 2:
absorbed_mla/inference/full_prefill.py
  whole_prompts_attend_absorbed_too: one = rows.query_lengths == 1 -> one = rows.query_lengths >= 1
absorbed_mla/inference/kv_offload/blocks.py
  restored_blocks_are_read_from_old_copies: self._ring.forget() ->
  windows_cut_one_block_early: if total + count > most: -> if total + count >= most:
  padding_leaves_the_device: nonzero(on_device[:-1]).flatten() -> nonzero(on_device).flatten()
  plan_of_blocks_before_they_moved: if moved or self._planned is None -> if self._planned is None
  loaded_blocks_are_not_moved: self._filled[list(blocks)] = True ->
absorbed_mla/inference/kv_offload/context.py
  tiers_plan_paused_requests: self.paused_request_count, self -> 0, self
absorbed_mla/inference/kv_offload/staging_buffers.py
  staged_copy_waits_for_no_reader: self._streams.await_free(buffer) -> pass
  staged_window_is_read_at_once: self._streams.await_copied(self._taken) -> pass
  staged_copies_before_blocks_move: self._streams.begin() -> pass
  buffer_filled_while_it_is_read: (self._buffers) - (self._taken is not None) -> (self._buffers)
  staged_order_forgets_the_pass: self._following = layer, self._pass, -> self._following = layer, 0,
absorbed_mla/inference/latent_memory.py
  offloaded_part_starts_at_zero: start += self.block_size -> start += 0
  offloaded_tokens_from_the_end: room = max(0, min(len(kv), self.block_size - first))
    -> room = min(len(kv), self.block_size - first)
absorbed_mla/inference/prefill_context_parallel.py
  prompts_of_few_tokens_divided: if tokens < LEAST_TOKENS or tokens % -> if tokens %
  decode_steps_divided: or context.is_decode_only(): -> :
  runs_of_a_rank_begin_at_zero: before += own.stop - own.start -> before += 0
  divided_prompt_tokens_by_rank: return parts.transpose(0, 1).flatten -> return parts.flatten
  divided_prompt_places_on_rank: here = before + first - own.start -> here = before
absorbed_mla/inference/window.py
  window_in_a_part_of_a_cache: .clamp(min=key_start) -> .clamp(min=0)
  copied_keys_of_another_row: rows.block_table[row[piece]] -> rows.block_table[row[piece] * 0]
absorbed_mla/inference/row_groups.py
  window_over_gathered_keys: self.context[keys.row] - keys.start if -> self.context[keys.row] if
  fp8_own_tokens_not_rounded: own = kv if self.fp8 is None else self.fp8.rounded(kv) -> own = kv
  context_chunk_dropped: ranges, room = [], chunk_size -> return
  context_of_another_row: part.gather(self.first_row + keys.row, -> part.gather(keys.row,
  segment_on_the_wrong_axis: starts - first if first else starts -> starts
  gathered_keys_of_other_rows: key = "gathered", self.first_row, causal, *ranges -> key = "gathered"
  divided_prompt_row_of_a_run: row, first - start, place, -> row, 0, place,
"""
)
