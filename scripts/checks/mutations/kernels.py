"""Kernels and their launches."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
absorbed_mla/kernels/added_norm.py
  norm_of_a_sum_not_rounded: total = narrow(total, total_ptr.dtype.element_ty, INTERPRETED) ->
absorbed_mla/kernels/dsa/forward.py
  fp8_chosen_keys_of_the_next_block: _, _, seen = keys_of_entries(entry, own, TOKENS)
    -> _, _, seen = keys_of_entries(following, own, TOKENS)
absorbed_mla/kernels/dsa/index_chosen.py
  relu_gradient_at_zero_of_chosen_keys: found > 0, of_products, 0.0 -> found >= 0, of_products, 0.0
absorbed_mla/kernels/dsa/index_gradient.py
  relu_gradient_at_zero_of_visible_keys: found > 0, of_products, 0.0 -> found >= 0, of_products, 0.0
absorbed_mla/kernels/fp8_latents.py
  fp8_scale_of_first_group: * scales[:, :, None] -> * scales[:, :1, None]
  fp8_largest_of_positive_numbers: (tl.int32, bitcast=True) & 0x7FFFFFFF -> (tl.int32, bitcast=True)
  fp8_decoded_by_the_first_scale: tl.load(scales_ptr + token * stride_scales + group,
    -> tl.load(scales_ptr + token * stride_scales,
  fp8_rows_without_k_rope: scales.shape[-1] + bool(rope)) -> scales.shape[-1])
absorbed_mla/kernels/hopper/decode.py
  pieces_cut_a_block_later: -(PIECE.value // KEYS.value) if -> -(PIECE.value // KEYS.value) - 1 if
  fp8_rows_without_pieces: if call.batch_invariant and _is_long(call.window)
    -> if call.batch_invariant and not call.fp8 and _is_long(call.window)
  parity_of_few_fp8_rows: if not call.batch_invariant and _has_pieces( -> if _has_pieces(
absorbed_mla/kernels/hopper/decode_kernel.py
  lse_of_prefixes_over_those_of_other_rows: gl.store(tile.results(whole[1], heads) + row
    -> gl.store(whole[1] + row
  decode_program_forgets_its_phase: blocks += count_blocks(tile)
    |        tile = part.tile(index)
    -> tile = part.tile(index)
absorbed_mla/kernels/hopper/few_rows_kernel.py
  few_rows_of_nan_behind_the_last_key: keys - last * KEYS < KEYS: -> keys - last * KEYS < KEYS - 1:
absorbed_mla/kernels/hopper/few_rows_shared.py
  few_rows_skip_a_phase_of_a_piece: TURNS=PIECES * DECODE_ROLES -> TURNS=PIECES
absorbed_mla/kernels/hopper/forward_kernel.py
  forward_largest_is_the_reference: index, most * (scale * LN_2), -> index, top * (scale * LN_2),
  forward_norm_overwritten_early: mbarrier.wait(shared.norm_empty.index(0), (tiles & 1) ^ 1) ->
absorbed_mla/kernels/hopper/forward_scores.py
  forward_never_rescaled: (factor != 1.0).to(gl.int32) -> (factor > 1.0).to(gl.int32)
  forward_reference_may_be_far_below: _GROWTH = gl.constexpr(8.0) -> _GROWTH = gl.constexpr(800.0)
absorbed_mla/kernels/hopper/forward_shared.py
  decode_queries_loaded_early: mbarrier.wait(shared.q_empty.index(0), (tiles & 1) ^ 1) ->
  unused_latents_not_cleared: gl.where(row < count, part.load(layout), 0.0) -> part.load(layout)
absorbed_mla/kernels/hopper/fp8_pieces.py
  few_rows_reuse_a_piece_early: if before >= 0: -> if before < 0:
  few_rows_ask_for_blocks_behind_the_last_key:
    - size = gl.where(block * KEYS < tile.keys, self.together, 0)
    -> size = self.together
  few_rows_reuse_a_block_early: wait_empty(shared.latents_empty, number, STAGES) -> pass
  few_rows_scaled_by_the_first_group: scales.slice(group, 1, dim=1) -> scales.slice(0, 1, dim=1)
absorbed_mla/kernels/hopper/fp8_rows.py
  fp8_rows_reuse_a_stage_early: mbarrier.wait(shared.right_empty.index(stage), parity) -> pass
  fp8_rows_scaled_by_the_first_group: load(rows + first + column // GROUP) -> load(rows + first)
  fp8_rows_behind_the_last_key: gl.minimum(key, gl.maximum(tile.keys, 1) - 1) -> key
absorbed_mla/kernels/hopper/multi_head_backward_tile.py
  window_of_one_more_query: self.query_start + self.offset - window
    -> self.query_start + self.offset - window - 1
  window_hides_nothing_in_a_block: self.offset > window) -> self.offset > window + QUERIES)
absorbed_mla/kernels/hopper/multi_head_kernel.py
  multi_head_values_past_the_keys: _clear(shared.value.index((blocks + last) % STAGES), left) ->
  multi_head_queries_too_early: mbarrier.wait(shared.q_empty.index(HALF), (number & 1) ^ 1) ->
  multi_head_output_without_the_sink: norm = norm * kept -> pass
absorbed_mla/kernels/hopper/multi_head_softmax.py
  multi_head_reference_moves_without_rescaling: where(grows, highest, top) -> maximum(top, highest)
  multi_head_lse_without_the_sink: total * kept + gl.exp2(logit - greater) -> total * kept
absorbed_mla/kernels/hopper/multi_head_tile.py
  multi_head_diagonal_of_the_first_half: self.offset + HALF * ROWS + 1 -> self.offset + ROWS + 1
  multi_head_window_of_one_more_key: (query + self.offset - window)
    -> (query + self.offset - window - 1)
  multi_head_last_section: gl.minimum(self.section, self.groups - first) -> self.section
absorbed_mla/kernels/hopper/paged_keys.py
  decode_reuses_a_stage_early: mbarrier.wait(shared.right_empty.index(stage), parity) ->
  decode_reads_behind_the_table: gl.minimum(tile.key_start + block * KEYS + page, last)
    -> tile.key_start + block * KEYS + page
absorbed_mla/kernels/hopper/pieces.py
  pieces_without_the_larger_lse: factors.index(4).store(higher) -> factors.index(4).store(bits)
  pieces_added_before_they_are_weighed: mbarrier.wait(self.full.index(0), turn & 1) ->
  pieces_of_few_columns_in_one_place: column = first + part * self.COLUMNS
    -> column = first + part * self.COLUMNS // COLUMNS * COLUMNS
absorbed_mla/kernels/hopper/product_kernel.py
  wide_product_forgets_a_part: if part > 0: -> if part > 1:
  wide_product_sums_over_results: tma.store_wait(0)
    |                synchronize()
    ->
  wide_product_results_overwritten: tma.store_wait(BUFFERS - 1) -> tma.store_wait(BUFFERS)
  wide_product_operands_given_up_early: acc = warpgroup_mma_wait(1, deps=[acc])
    |        shared.ring.release(
    -> shared.ring.release(
  wide_product_of_the_first_rows: row += ROLE * ROWS -> pass
absorbed_mla/kernels/hopper/tensor_map.py
  launch_of_any_box: "box": f"{dtype}{block}{layout}" -> "box": f"{dtype}{block}"
absorbed_mla/kernels/hopper/tile_scheduler.py
  forward_tiles_dealt_twice: 0, program, programs - 1 - program -> 0, program, programs - 1
absorbed_mla/kernels/invariant/cpu.py
  narrow_products_in_another_order: _LEAST_COLUMNS = 16 -> _LEAST_COLUMNS = 1
absorbed_mla/kernels/invariant/grouped_product.py
  grouped_product_of_the_expert_before: past <= row_tile -> past < row_tile
  grouped_product_of_the_first_rows: row = begin + number * BLOCK_R + -> row = begin +
  grouped_product_of_even_experts: rows // tile.rows + min(rows, experts) -> -(-rows // tile.rows)
absorbed_mla/kernels/invariant/matrix_product.py
  last_tiles_in_other_columns: place // width, first_column + place -> place // width, place
  parts_in_another_order: part = first + i -> part = parts - 1 - first - i
absorbed_mla/kernels/invariant/rms_norm.py
  weight_twice_in_the_norm: scale * (grad - normed * ( -> scale * (grad - weight * normed * (
absorbed_mla/kernels/invariant/row_topk.py
  topk_puts_minus_zero_behind_zero: key = tl.where(key == -1, 0, key) ->
  topk_takes_the_last_of_equal_ones: first = -_greatest(tl.where(wanted, -column, -BLOCK))
    -> first = _greatest(tl.where(wanted, column, -BLOCK))
absorbed_mla/kernels/hopper/tree_product_kernel.py
  wide_leaves_in_the_order_of_memory: (leaf % RUNS * RUN + leaf // RUNS) -> leaf
  waiting_sums_of_another_level: target = waiting + (level + 1) * -> target = waiting + level *
absorbed_mla/kernels/invariant/tree_product.py
  subtrees_added_in_another_order: FIRST + NUMBER // 2, NUMBER // 2) -> FIRST, NUMBER // 2)
absorbed_mla/kernels/invariant/tree.py
  leaves_beside_other_ones: place // RUNS, tl.int64)
    -> place // RUNS * 3 % RUN, tl.int64)
  leaf_with_summands_of_the_next: k < leaf_length - first -> k < BLOCK_K
absorbed_mla/kernels/launch.py
  launch_of_any_alignment: append(arg.data_ptr() % _ALIGNMENT == 0) ->
  launch_of_any_number: append(_kind_of_int(arg)) -> append(kind)
  launch_on_the_first_device: driver.active.get_current_device() -> 0
absorbed_mla/kernels/moe/choice.py
  grouped_experts_of_all_groups: tl.where(taken[:, None], key -> tl.where(there, key
  kernel_ranks_groups_as_megatron: (group_score_topk or topk // group_topk) -> (topk // group_topk)
  kernel_normalises_as_megatron: if normalize is None else normalize -> if True else normalize
  one_expert_with_probability_one: (not softmax and topk > 1) if -> not softmax if
  chosen_expert_without_a_number: tl.where(key == key, key, -1e30) -> key
absorbed_mla/kernels/moe/logits.py
  router_logits_of_the_first_part: part * steps_of_part * SUMMANDS -> 0 * steps_of_part * SUMMANDS
  router_logits_behind_the_last_summand: end = tl.minimum(first + steps_of_part * SUMMANDS, width)
    -> end = first + steps_of_part * SUMMANDS
absorbed_mla/kernels/moe/order.py
  grouped_experts_order_of_tokens: other[None, :] < item[:, None] -> other[None, :] > item[:, None]
  experts_of_lower_ranks_stand_first: (expert < 0) | (expert >= count) -> expert >= count
absorbed_mla/kernels/moe/skinny_gemm.py
  few_rows_of_the_second_expert: expert - 1, mask=expert > 0 -> expert - 1, mask=expert > 1
absorbed_mla/kernels/moe/sums.py
  grouped_experts_sums_of_other_ranks: mask=there & (place < end) -> mask=there
  grouped_experts_order_of_rows: place = tl.reduce(places, 0, elementwise_min)
    -> place = tl.load(places_ptr + token * CHOICES + CHOICES - 1 - choice)
  grouped_experts_rounded_at_last:
    - total = narrow(total, out_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
    -> pass
absorbed_mla/kernels/moe/swiglu.py
  swiglu_of_a_gate_not_rounded: _rounded(_silu_of_pytorch(gate, INTERPRETED), out_ptr, INTERPRETED)
    -> _silu_of_pytorch(gate, INTERPRETED)
  swiglu_without_megatrons_offset: (up + 0.0) -> up
absorbed_mla/kernels/paged/merge_rows.py
  merged_rows_without_further_splits: range(0, all_splits, SPLITS) -> range(0, SPLITS, SPLITS)
  merged_rows_in_two_units: of_other[0] * LOG2_E -> of_other[0]
absorbed_mla/kernels/paged/new_latents.py
  new_latents_of_padding: cached = row < places -> cached = row < count
absorbed_mla/kernels/paged/schedule.py
  decode_splits_overlap: (behind | (cut < least), 0, cut), -> (behind | (cut < least), 0, cut - 1),
  prefixes_are_causal: shared = request < prefixes -> shared = request < 0
  prefixes_over_other_rows: tl.where(shared, num_tokens, 0), -> tl.where(shared, 0, 0),
  last_split_not_combined: entry + 5, cuts + 1, mask -> entry + 5, tl.maximum(cuts, 1), mask
absorbed_mla/kernels/sampling/inverse_cdf.py
  kernels_leave_ties_of_every_piece: wanted - (cumsum(ties) - ties) -> wanted + ties - ties
absorbed_mla/kernels/sampling/thresholds.py
  kernels_leave_a_token_less: goal - count_above, -> goal - count_above - 1,
  kernels_search_from_the_wrong_sum: all_tokens = above + wanted * weight -> all_tokens = above
  top_p_kernel_leaves_a_token_too_many: goal.to(tl.float64) < limit -> goal.to(tl.float64) <= limit
absorbed_mla/kernels/sampling/weights.py
  infinity_draws_a_token: (logit > float("-inf")) & (logit < float("inf")) -> logit == logit
  min_p_kernel_leaves_out_a_tie: (share >= min_p) -> (share > min_p)
absorbed_mla/kernels/transposed_product.py
  last_row_lost: .add_(a[-1].float()[:, None] * b[-1].float()) ->
  lost_rows_said_in_evaluation: if not torch.is_grad_enabled() or not may -> if not may
"""
)
