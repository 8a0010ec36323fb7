"""Kernels."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "grouped_experts_sums_of_other_ranks": Mutation(
        "absorbed_mla/kernels/moe/sums.py", "mask=there & (place < end)", "mask=there"
    ),
    "swiglu_of_a_gate_not_rounded": Mutation(
        "absorbed_mla/kernels/moe/swiglu.py",
        "_rounded(_silu_of_pytorch(gate, INTERPRETED), out_ptr, INTERPRETED)",
        "_silu_of_pytorch(gate, INTERPRETED)",
    ),
    "swiglu_without_megatrons_offset": Mutation(
        "absorbed_mla/kernels/moe/swiglu.py", "(up + 0.0)", "up"
    ),
    "grouped_experts_of_all_groups": Mutation(
        "absorbed_mla/kernels/moe/choice.py",
        "tl.where(taken[:, None], key",
        "tl.where(there, key",
    ),
    "grouped_experts_order_of_tokens": Mutation(
        "absorbed_mla/kernels/moe/order.py",
        "other[None, :] < item[:, None]",
        "other[None, :] > item[:, None]",
    ),
    "router_logits_of_the_first_part": Mutation(
        "absorbed_mla/kernels/moe/logits.py",
        "first = part * steps_of_part * SUMMANDS",
        "first = 0 * steps_of_part * SUMMANDS",
    ),
    "new_latents_of_padding": Mutation(
        "absorbed_mla/kernels/paged/new_latents.py",
        "cached = row < places",
        "cached = row < count",
    ),
    "norm_of_a_sum_not_rounded": Mutation(
        "absorbed_mla/kernels/added_norm.py",
        "    total = narrow(total, total_ptr.dtype.element_ty, INTERPRETED)\n",
        "",
    ),
    "fp8_scale_of_first_group": Mutation(
        "absorbed_mla/kernels/fp8_latents.py", "* scales[:, :, None]", "* scales[:, :1, None]"
    ),
    "fp8_chosen_keys_of_the_next_block": Mutation(
        "absorbed_mla/kernels/dsa/forward.py",
        "_, _, seen = keys_of_entries(entry, own, TOKENS)",
        "_, _, seen = keys_of_entries(following, own, TOKENS)",
    ),
    "launch_of_any_alignment": Mutation(
        "absorbed_mla/kernels/launch.py",
        "            append(arg.data_ptr() % _ALIGNMENT == 0)\n",
        "",
    ),
    "launch_of_any_number": Mutation(
        "absorbed_mla/kernels/launch.py", "append(_kind_of_int(arg))", "append(kind)"
    ),
    "launch_on_the_first_device": Mutation(
        "absorbed_mla/kernels/launch.py", "driver.active.get_current_device()", "0"
    ),
    "launch_of_any_box": Mutation(
        "absorbed_mla/kernels/hopper/tensor_map.py",
        '"box": f"{dtype}{block}{layout}"',
        '"box": f"{dtype}{block}"',
    ),
    "multi_head_values_past_the_keys": Mutation(
        "absorbed_mla/kernels/hopper/multi_head_kernel.py",
        "            _clear(shared.value.index((blocks + last) % STAGES), left)\n",
        "",
    ),
    "multi_head_queries_too_early": Mutation(
        "absorbed_mla/kernels/hopper/multi_head_kernel.py",
        "    mbarrier.wait(shared.q_empty.index(HALF), (number & 1) ^ 1)\n",
        "",
    ),
    "multi_head_diagonal_of_the_first_half": Mutation(
        "absorbed_mla/kernels/hopper/multi_head_tile.py",
        "self.offset + HALF * ROWS + 1",
        "self.offset + ROWS + 1",
    ),
    "multi_head_reference_moves_without_rescaling": Mutation(
        "absorbed_mla/kernels/hopper/multi_head_softmax.py",
        "top = gl.where(grows, highest, top)",
        "top = gl.maximum(top, highest)",
    ),
    "multi_head_last_section": Mutation(
        "absorbed_mla/kernels/hopper/multi_head_tile.py",
        "section = gl.minimum(self.section, self.groups - first)",
        "section = self.section",
    ),
    "decode_reuses_a_stage_early": Mutation(
        "absorbed_mla/kernels/hopper/paged_keys.py",
        "            mbarrier.wait(shared.right_empty.index(stage), parity)\n",
        "",
    ),
    "pieces_without_the_larger_lse": Mutation(
        "absorbed_mla/kernels/hopper/pieces.py",
        "self.factors.index(4).store(higher)",
        "self.factors.index(4).store(bits)",
    ),
    "pieces_added_before_they_are_weighed": Mutation(
        "absorbed_mla/kernels/hopper/pieces.py",
        "        mbarrier.wait(self.full.index(0), turn & 1)\n",
        "",
    ),
    "pieces_cut_a_block_later": Mutation(
        "absorbed_mla/kernels/hopper/decode.py",
        "num_splits = -(PIECE.value // KEYS.value) if",
        "num_splits = -(PIECE.value // KEYS.value) - 1 if",
    ),
    "pieces_of_the_first_sequence": Mutation(
        "absorbed_mla/core_attention/invariant_hopper.py",
        "blocks = first_keys[:, None] + ",
        "blocks = first_keys[:1, None] + 0 * first_keys[:, None] + ",
    ),
    "fp8_rows_without_pieces": Mutation(
        "absorbed_mla/kernels/hopper/decode.py",
        "if call.batch_invariant and _is_long(call.window)",
        "if call.batch_invariant and not call.fp8 and _is_long(call.window)",
    ),
    "pieces_of_few_columns_in_one_place": Mutation(
        "absorbed_mla/kernels/hopper/pieces.py",
        "column = first + part * self.COLUMNS\n",
        "column = first + part * self.COLUMNS // COLUMNS * COLUMNS\n",
    ),
    "parity_of_few_fp8_rows": Mutation(
        "absorbed_mla/kernels/hopper/decode.py",
        "if not call.batch_invariant and _has_pieces(",
        "if _has_pieces(",
    ),
    "decode_reads_behind_the_table": Mutation(
        "absorbed_mla/kernels/hopper/paged_keys.py",
        "gl.minimum(tile.key_start + block * KEYS + page, last)",
        "tile.key_start + block * KEYS + page",
    ),
    "fp8_rows_reuse_a_stage_early": Mutation(
        "absorbed_mla/kernels/hopper/fp8_rows.py",
        "        mbarrier.wait(shared.right_empty.index(stage), parity)\n",
        "        pass\n",
    ),
    "fp8_rows_scaled_by_the_first_group": Mutation(
        "absorbed_mla/kernels/hopper/fp8_rows.py",
        "gl.load(rows + first + column // GROUP)",
        "gl.load(rows + first)",
    ),
    "fp8_rows_behind_the_last_key": Mutation(
        "absorbed_mla/kernels/hopper/fp8_rows.py",
        "gl.minimum(key, gl.maximum(tile.keys, 1) - 1)",
        "key",
    ),
    "few_rows_reuse_a_piece_early": Mutation(
        "absorbed_mla/kernels/hopper/fp8_pieces.py",
        "                if before >= 0:\n",
        "                if before < 0:\n",
    ),
    "few_rows_skip_a_phase_of_a_piece": Mutation(
        "absorbed_mla/kernels/hopper/few_rows_shared.py",
        "TURNS=PIECES * DECODE_ROLES",
        "TURNS=PIECES",
    ),
    "few_rows_ask_for_blocks_behind_the_last_key": Mutation(
        "absorbed_mla/kernels/hopper/fp8_pieces.py",
        "size = gl.where(block * KEYS < tile.keys, self.together, 0)",
        "size = self.together",
    ),
    "few_rows_reuse_a_block_early": Mutation(
        "absorbed_mla/kernels/hopper/fp8_pieces.py",
        "wait_empty(shared.latents_empty, number, STAGES)",
        "pass",
    ),
    "few_rows_scaled_by_the_first_group": Mutation(
        "absorbed_mla/kernels/hopper/fp8_pieces.py",
        "scales.slice(group, 1, dim=1)",
        "scales.slice(0, 1, dim=1)",
    ),
    "few_rows_of_nan_behind_the_last_key": Mutation(
        "absorbed_mla/kernels/hopper/few_rows_kernel.py",
        "    if tile.keys - last * KEYS < KEYS:\n",
        "    if tile.keys - last * KEYS < KEYS - 1:\n",
    ),
    "decode_splits_overlap": Mutation(
        "absorbed_mla/kernels/paged/schedule.py",
        "tl.store(entries + 1, tl.where(behind | (cut < least), 0, cut), mask=mine)",
        "tl.store(entries + 1, tl.where(behind | (cut < least), 0, cut - 1), mask=mine)",
    ),
    "decode_program_forgets_its_phase": Mutation(
        "absorbed_mla/kernels/hopper/decode_kernel.py",
        "        blocks += count_blocks(tile)\n        tile = part.tile(index)\n",
        "        tile = part.tile(index)\n",
    ),
    "decode_queries_loaded_early": Mutation(
        "absorbed_mla/kernels/hopper/forward_shared.py",
        "    mbarrier.wait(shared.q_empty.index(0), (tiles & 1) ^ 1)\n",
        "",
    ),
    "forward_never_rescaled": Mutation(
        "absorbed_mla/kernels/hopper/forward_scores.py",
        "(factor != 1.0).to(gl.int32)",
        "(factor > 1.0).to(gl.int32)",
    ),
    "forward_reference_may_be_far_below": Mutation(
        "absorbed_mla/kernels/hopper/forward_scores.py",
        "_GROWTH = gl.constexpr(8.0)",
        "_GROWTH = gl.constexpr(800.0)",
    ),
    "forward_largest_is_the_reference": Mutation(
        "absorbed_mla/kernels/hopper/forward_kernel.py",
        "gl.store(largest + index, most * (scale * LN_2), mask=inside)",
        "gl.store(largest + index, top * (scale * LN_2), mask=inside)",
    ),
    "forward_norm_overwritten_early": Mutation(
        "absorbed_mla/kernels/hopper/forward_kernel.py",
        "    mbarrier.wait(shared.norm_empty.index(0), (tiles & 1) ^ 1)\n",
        "",
    ),
    "forward_tiles_dealt_twice": Mutation(
        "absorbed_mla/kernels/hopper/forward_tiles.py",
        "gl.where(turn % 2 == 0, program, programs - 1 - program)",
        "gl.where(turn % 2 == 0, program, programs - 1)",
    ),
    "last_split_not_combined": Mutation(
        "absorbed_mla/kernels/paged/schedule.py",
        "tl.store(entry + 5, cuts + 1, mask=there)",
        "tl.store(entry + 5, tl.maximum(cuts, 1), mask=there)",
    ),
    "unused_latents_not_cleared": Mutation(
        "absorbed_mla/kernels/hopper/forward_shared.py",
        "gl.where(row < count, part.load(layout), 0.0)",
        "part.load(layout)",
    ),
    "last_tiles_in_other_columns": Mutation(
        "absorbed_mla/kernels/invariant/matrix_product.py",
        "row, column = place // width, first_column + place % width",
        "row, column = place // width, place % width",
    ),
    "parts_in_another_order": Mutation(
        "absorbed_mla/kernels/invariant/matrix_product.py",
        "            part = first + i\n",
        "            part = parts - 1 - first - i\n",
    ),
    "wide_product_forgets_a_part": Mutation(
        "absorbed_mla/kernels/hopper/product_kernel.py", "if part > 0:", "if part > 1:"
    ),
    "wide_product_sums_over_results": Mutation(
        "absorbed_mla/kernels/hopper/product_kernel.py",
        "                tma.store_wait(0)\n                synchronize()\n",
        "",
    ),
    "wide_product_results_overwritten": Mutation(
        "absorbed_mla/kernels/hopper/product_kernel.py",
        "tma.store_wait(BUFFERS - 1)",
        "tma.store_wait(BUFFERS)",
    ),
    "wide_product_operands_given_up_early": Mutation(
        "absorbed_mla/kernels/hopper/product_kernel.py",
        "        acc = warpgroup_mma_wait(1, deps=[acc])\n        shared.ring.release(",
        "        shared.ring.release(",
    ),
    "wide_product_of_the_first_rows": Mutation(
        "absorbed_mla/kernels/hopper/product_kernel.py", "row += ROLE * ROWS", "pass"
    ),
    "grouped_product_of_the_expert_before": Mutation(
        "absorbed_mla/kernels/invariant/grouped_product.py", "past <= row_tile", "past < row_tile"
    ),
    "grouped_product_of_the_first_rows": Mutation(
        "absorbed_mla/kernels/invariant/grouped_product.py",
        "row = begin + number * BLOCK_R + ",
        "row = begin + ",
    ),
    "grouped_product_of_even_experts": Mutation(
        "absorbed_mla/kernels/invariant/grouped_product.py",
        "return rows // tile.rows + min(rows, experts)",
        "return -(-rows // tile.rows)",
    ),
    "grouped_experts_order_of_rows": Mutation(
        "absorbed_mla/kernels/moe/sums.py",
        "place = tl.reduce(places, 0, elementwise_min)",
        "place = tl.load(places_ptr + token * CHOICES + CHOICES - 1 - choice)",
    ),
    "grouped_experts_rounded_at_last": Mutation(
        "absorbed_mla/kernels/moe/sums.py",
        "total = narrow(total, out_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)",
        "pass",
    ),
    "topk_puts_minus_zero_behind_zero": Mutation(
        "absorbed_mla/kernels/invariant/row_topk.py",
        "    key = tl.where(key == -1, 0, key)\n",
        "",
    ),
    "topk_takes_the_last_of_equal_ones": Mutation(
        "absorbed_mla/kernels/invariant/row_topk.py",
        "first = -_greatest(tl.where(wanted, -column, -BLOCK))",
        "first = _greatest(tl.where(wanted, column, -BLOCK))",
    ),
    "weight_twice_in_the_norm": Mutation(
        "absorbed_mla/kernels/invariant/rms_norm.py",
        "scale * (grad - normed * (",
        "scale * (grad - weight * normed * (",
    ),
}
