#!/usr/bin/env python3
"""Break the package on purpose, one line at a time, and see which test notices.

Each mutation is applied to a copy of the checkout; the unit tests and then the distributed tests at
TP=2 run until the first failure. A mutation that no test notices makes the script exit with 1.

    $ python scripts/checks/mutation_check.py
    (nothing broken)         not caught
    rope_pairing             caught in tests/unit by tests/unit/attention/test_shapes.py

With ``--tests`` only the named test files run, which is quick and shows what they notice.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import leave, run_script

REPO = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """One wrong line: in ``file``, ``right`` becomes ``wrong``."""

    file: str
    right: str
    wrong: str


MUTATIONS = {
    "grouped_experts_places": Mutation(
        "absorbed_mla/experts/rows.py",
        "scatter_(0, choices, numbers[: len(choices)])",
        "scatter_(0, numbers[: len(choices)], choices)",
    ),
    "grouped_experts_ends": Mutation(
        "absorbed_mla/experts/rows.py", "right=True, out_int32=True", "out_int32=True"
    ),
    "grouped_experts_of_other_ranks": Mutation(
        "absorbed_mla/experts/rows.py", "masked_fill(others.unsqueeze(1), 0)", "clone()"
    ),
    "grouped_experts_sums_of_other_ranks": Mutation(
        "absorbed_mla/kernels/experts/sums.py", "mask=there & (place < end)", "mask=there"
    ),
    "grouped_experts_of_all_groups": Mutation(
        "absorbed_mla/kernels/experts/choice.py",
        "tl.where(taken[:, None], key",
        "tl.where(there, key",
    ),
    "grouped_experts_order_of_tokens": Mutation(
        "absorbed_mla/kernels/experts/order.py",
        "other[None, :] < item[:, None]",
        "other[None, :] > item[:, None]",
    ),
    "grouped_experts_unstacked": Mutation(
        "absorbed_mla/experts/experts.py", "if not self._is_stacked(whole=False):", "if False:"
    ),
    "fp8_scale_of_first_group": Mutation(
        "absorbed_mla/kernels/fp8_latents.py", "* scales[:, :, None]", "* scales[:, :1, None]"
    ),
    "fp8_chosen_keys_of_the_next_block": Mutation(
        "absorbed_mla/kernels/dsa/forward.py",
        "_, _, seen = keys_of_entries(entry, own, TOKENS)",
        "_, _, seen = keys_of_entries(following, own, TOKENS)",
    ),
    "fp8_holes_of_a_selection": Mutation(
        "absorbed_mla/dsa/cached_attention.py",
        "masked_fill(support.indices < 0, -1)",
        "masked_fill(support.indices < 0, 0)",
    ),
    "fp8_own_tokens_not_rounded": Mutation(
        "absorbed_mla/inference/chunked_context.py",
        "own = kv if self.fp8 is None else self.fp8.rounded(kv)",
        "own = kv",
    ),
    "fp8_training_not_rounded": Mutation(
        "absorbed_mla/attention.py", "kv = self.cached_attention.rounded(kv)", "pass"
    ),
    "rope_pairing": Mutation(
        "absorbed_mla/rope.py",
        "x[..., 0::2].to(compute), x[..., 1::2].to(compute)",
        "(half.to(compute) for half in x.chunk(2, dim=-1))",
    ),
    "muon_rows_by_head": Mutation(
        "absorbed_mla/muon/matrices.py",
        "return [torch.cat(per_head, dim=1).flatten(0, 1)]",
        "return [torch.cat([part.flatten(0, 1) for part in per_head])]",
    ),
    "muon_states_are_joined": Mutation(
        "absorbed_mla/muon/step.py", "            if state:\n", "            if False:\n"
    ),
    "gradients_of_recomputation_in_graphs": Mutation(
        "absorbed_mla/graph_capture.py",
        "        return inputs\n",
        "        return inputs\n    return inputs\n",
    ),
    "mask_of_a_capture": Mutation(
        "absorbed_mla/graph_capture.py",
        "    if is_graph_capturing():\n        return None\n",
        "    if is_graph_capturing():\n        return attention_mask\n",
    ),
    "softmax_scale": Mutation(
        "absorbed_mla/dims.py",
        "math.sqrt(dims.qk_head_dim)",
        "math.sqrt(dims.kv_down_dim)",
    ),
    "softmax_mscale": Mutation(
        "absorbed_mla/dims.py",
        "yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim)",
        "yarn_mscale(config.rotary_scaling_factor, config.mscale)",
    ),
    "kv_row_interleave": Mutation(
        "absorbed_mla/checkpoint/layout.py",
        "for part, count in zip(by_head.split(one_head, 1), rows)",
        "for part, count in zip(whole.split(rows, 0), rows)",
    ),
    "k_rope_reduction_sp": Mutation(
        "absorbed_mla/tensor_parallel.py",
        "tensor_parallel_output_grad=True",
        "tensor_parallel_output_grad=False",
    ),
    "k_rope_reduction_no_sp": Mutation(
        "absorbed_mla/tensor_parallel.py",
        "return copy_to_tensor_model_parallel_region(x, group=tp_group)",
        "return x",
    ),
    "causal_offset": Mutation(
        "absorbed_mla/core_attention/masks/scores.py",
        "triu(chunk.causal_offset + 1)",
        "triu(chunk.causal_offset + 2)",
    ),
    "q_norm_summed_by_host": Mutation(
        "absorbed_mla/projections.py",
        "average_gradients_across_tp_domain=True",
        "",
    ),
    "shared_dropout_seed": Mutation(
        "absorbed_mla/core_attention/masks/scores.py",
        "            self.dropout_seed,",
        "            torch.seed() % 2**62,",
    ),
    "late_chunk_of_a_rank": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return rank, 2 * self.cp_size - 1 - rank",
        "return rank, self.cp_size + rank",
    ),
    "positions_in_the_pack": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return self.tokens() - starts.repeat_interleave(slots)",
        "return self.tokens()",
    ),
    "padding_is_attended": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "return _clamp(length - early * size, size), _clamp(length - late * size, size)",
        "return size, size",
    ),
    "ring_ignores_late_keys": Mutation(
        "absorbed_mla/context_parallel/layout.py",
        "spans += _span(first + size, late, first, every_key, None)",
        "spans += _span(first + size, late, first, early_keys, None)",
    ),
    "gradient_scaled_twice": Mutation(
        "absorbed_mla/context_parallel/strategies/all_gather.py",
        "        return own\n",
        "        return own / self.layout.cp_size\n",
    ),
    "gradient_stays_away": Mutation(
        "absorbed_mla/context_parallel/strategies/p2p.py",
        "return own + transfer.received()",
        "return transfer.received() * 0 + own",
    ),
    "gradient_of_shared_keys": Mutation(
        "absorbed_mla/core_attention/backends/cudnn.py",
        "_joined((a, b, a not in seen)",
        "_joined((a, b, True)",
    ),
    "gathered_in_the_wrong_memory": Mutation(
        "absorbed_mla/context_parallel/choice.py",
        "keep and gathered <= own",
        "keep",
    ),
    "merge_weights": Mutation(
        "absorbed_mla/core_attention/merge.py",
        "for x in (lse, part_lse))",
        "for x in (lse, lse))",
    ),
    "rotated_gradient": Mutation(
        "absorbed_mla/rope.py",
        "cos, sin, back=True)",
        "cos, sin, back=False)",
    ),
    "rotated_view": Mutation(
        "absorbed_mla/rope.py",
        "x.clone() if x._is_view() else x",
        "x",
    ),
    "k_rope_gradient_of_one_head": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "extended[:, nope:, c:].diagonal",
        "extended[:1, nope:, c:].diagonal",
    ),
    "weight_gradient_slice": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "dw_k[:, :nope, :c]",
        "dw_k[:, rope:, :c]",
    ),
    "k_rope_of_another_token": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "= k_rope[:, None]",
        "= k_rope.roll(1, 0)[:, None]",
    ),
    "head_chunks_not_summed": Mutation(
        "absorbed_mla/core_attention/forms/expanded.py",
        "dkv = part if dkv is None else dkv.add_(part)",
        "dkv = part",
    ),
    "slowest_form": Mutation(
        "absorbed_mla/core_attention/selection.py",
        "form, chosen = min(found.able, ",
        "form, chosen = max(found.able, ",
    ),
    "form_without_backward": Mutation(
        "absorbed_mla/core_attention/cost.py",
        "(3 * key + 2 * value) if work.training else 0",
        "0",
    ),
    "varlen_alignment": Mutation(
        "absorbed_mla/core_attention/masks/varlen.py",
        "key_end=span.key_start + queries + offset)",
        "key_end=span.key_start + queries + offset + 1)",
    ),
    "uncovered_keys": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "(torch.empty_like if full else torch.zeros_like)(x)",
        "torch.empty_like(x)",
    ),
    "uncovered_queries": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "make = torch.empty if rules.spans.cover(tokens) else torch.zeros\n",
        "make = torch.empty\n",
    ),
    "atomics_where_forbidden": Mutation(
        "absorbed_mla/core_attention/backends/flash_attention_4.py",
        "deterministic=torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED",
        "deterministic=False",
    ),
    "tile_offset": Mutation(
        "absorbed_mla/core_attention/masks/tiles.py",
        "offset = offset + part * tokens",
        "offset = offset + part * (tokens - 1)",
    ),
    "tiles_of_another_layout": Mutation(
        "absorbed_mla/core_attention/masks/spans.py",
        "made.tables = DerivedTables()",
        "made.tables = cls.shared = getattr(cls, 'shared', None) or DerivedTables()",
    ),
    "cache_written_one_late": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "self.memory.write(self.offset, self.requests",
        "self.memory.write(self.offset + 1, self.requests",
    ),
    "decoded_at_position_zero": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "torch.arange(self.offset, self.max_position, device=device)",
        "torch.arange(0, self.max_position - self.offset, device=device)",
    ),
    "context_chunk_dropped": Mutation(
        "absorbed_mla/inference/chunked_context.py",
        "ranges, room = [], chunk_size",
        "return",
    ),
    "context_of_another_row": Mutation(
        "absorbed_mla/inference/chunked_context.py",
        "part.gather(self.first_row + keys.row,",
        "part.gather(keys.row,",
    ),
    "segment_on_the_wrong_axis": Mutation(
        "absorbed_mla/inference/segments.py",
        "starts - first if first else starts",
        "starts",
    ),
    "offloaded_part_starts_at_zero": Mutation(
        "absorbed_mla/inference/latent_memory.py",
        "start += self.block_size",
        "start += 0",
    ),
    "rows_of_a_former_forward": Mutation(
        "absorbed_mla/inference/caches/dynamic.py",
        "or number != context.step_count",
        "or False",
    ),
    "gathered_keys_of_other_rows": Mutation(
        "absorbed_mla/inference/chunked_context.py",
        'key = "gathered", self.first_row, causal, *ranges',
        'key = "gathered"',
    ),
    "cache_of_the_first_layer": Mutation(
        "absorbed_mla/inference/caches/dynamic.py",
        "DynamicStep(context, layer_number - offset, tokens, offset)",
        "DynamicStep(context, 1, tokens, offset)",
    ),
    "decode_reuses_a_stage_early": Mutation(
        "absorbed_mla/kernels/hopper/paged_keys.py",
        "            mbarrier.wait(shared.right_empty.index(stage), parity)\n",
        "",
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
        "absorbed_mla/kernels/hopper/decode_kernel.py",
        "        mbarrier.wait(empty[0].index(0), (index - begin & 1) ^ 1)\n",
        "",
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
    "head_product_of_one_token": Mutation(
        "absorbed_mla/absorb.py",
        '"sbnk,sbnc->nkc", x, grad',
        '"sbnk,sbnc->nkc", x[:1], grad[:1]',
    ),
    "shared_cache_owner_of_a_token": Mutation(
        "absorbed_mla/inference/cache_ranks.py",
        "(self.size - 1 - self.rank)) // self.size",
        "(self.size - 1)) // self.size",
    ),
    "shared_cache_writes_all_tokens": Mutation(
        "absorbed_mla/inference/cache_ranks.py",
        "torch.where(own, block, unused)",
        "block",
    ),
    "shared_cache_gathered_from_rank_0": Mutation(
        "absorbed_mla/inference/interleaved.py",
        ".roll(-(start % ranks.size), dims=0)",
        "",
    ),
    "shared_cache_memory": Mutation(
        "absorbed_mla/inference/interleaved_context.py",
        "self.block_size_tokens = whole // self.cache_ranks.size",
        "pass",
    ),
    "context_parallel_ranks_draw_tokens_each": Mutation(
        "absorbed_mla/generation/ranks.py",
        "        dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)",
        "        pass",
    ),
    "divided_mlp_summed_twice": Mutation(
        "absorbed_mla/data_parallel_attention/mlp.py",
        "        last.explicit_expert_comm = True",
        "        pass",
    ),
    "divided_tokens_keep_their_padding": Mutation(
        "absorbed_mla/data_parallel_attention/exchange.py",
        "torch.cat([part[:count] for part, count in zip(parts, counts)])",
        "parts.flatten(0, 1)[: sum(counts)]",
    ),
    "divided_vocabulary_in_the_order_of_tokens": Mutation(
        "absorbed_mla/data_parallel_attention/exchange.py",
        "found.transpose(0, 1).flatten(1)",
        "found.reshape(counts[self.rank], -1)",
    ),
    "divided_embedding_of_foreign_tokens": Mutation(
        "absorbed_mla/data_parallel_attention/vocabulary.py",
        "found = found.masked_fill(elsewhere.unsqueeze(-1), 0)",
        "pass",
    ),
    "divided_experts_with_all_probabilities": Mutation(
        "absorbed_mla/data_parallel_attention/dispatcher.py",
        "probs[:, own[0] : own[-1] + 1].T.flatten()",
        "probs[:, : len(own)].T.flatten()",
    ),
    "divided_ranks_pad_steps_alone": Mutation(
        "absorbed_mla/generation/host.py",
        "use_mpu_process_groups(), ep=exchange.group)",
        "use_mpu_process_groups())",
    ),
    "divided_prompt_tokens_by_rank": Mutation(
        "absorbed_mla/inference/token_shares.py",
        "return parts.transpose(0, 1).flatten(0, 2)",
        "return parts.flatten(0, 2)",
    ),
    "divided_prompt_places_on_rank": Mutation(
        "absorbed_mla/inference/token_shares.py",
        "here = before + first - own.start",
        "here = before",
    ),
    "divided_prompt_row_of_a_run": Mutation(
        "absorbed_mla/inference/chunked_context.py",
        "yield QueryRun(row, first - start, place,",
        "yield QueryRun(row, 0, place,",
    ),
    "front_forgets_what_was_generated": Mutation(
        "absorbed_mla/llm/front.py",
        "self._tokens[rank][number] += len(progress.tokens)",
        "pass",
    ),
    "inference_under_context_parallelism": Mutation(
        "absorbed_mla/attention.py",
        "cp_size=self.context_parallel.size",
        "cp_size=1",
    ),
    "angles_in_fp32": Mutation(
        "absorbed_mla/rope.py",
        "torch.outer(torch.arange(size, dtype=torch.float64), frequencies.clone())",
        "torch.outer(torch.arange(size, dtype=torch.float32), frequencies.float())",
    ),
    "yarn_clamped_to_pairs": Mutation(
        "absorbed_mla/rope.py",
        "parameters.qk_pos_emb_head_dim - 1)",
        "parameters.qk_pos_emb_head_dim // 2 - 1)",
    ),
    "fused_accumulation_off_for_all": Mutation(
        "absorbed_mla/linear.py",
        "maker_config = copy.copy(config)",
        "maker_config = config",
    ),
    "ring_passes_on_in_bf16": Mutation(
        "absorbed_mla/context_parallel/strategies/p2p.py",
        "grad.add_(transfer.received())",
        "grad.bfloat16().add_(transfer.received()).to(grad.dtype)",
    ),
    "ring_ends_in_bf16": Mutation(
        "absorbed_mla/context_parallel/strategies/p2p.py",
        "return own + transfer.received()",
        "return (own.bfloat16() + transfer.received().bfloat16()).to(own.dtype)",
    ),
    "ring_of_group_ranks": Mutation(
        "absorbed_mla/context_parallel/strategies/p2p.py",
        "dist.get_global_rank(group, (rank + by) % size)",
        "(rank + by) % size",
    ),
    "output_projection_initialised_too_wide": Mutation(
        "absorbed_mla/attention.py",
        "init_method=config.output_layer_init_method",
        "init_method=config.init_method",
    ),
    "second_derivatives_pruned": Mutation(
        "absorbed_mla/first_order.py",
        "return _refuse_derivatives(found, (*grads, *ctx.saved_tensors))",
        "return _refuse_derivatives(found, grads)",
    ),
    "rows_off_cache_lines": Mutation(
        "absorbed_mla/core_attention/tiled_reference.py",
        "return F.pad(x, (0, missing)) if missing else x",
        "return x",
    ),
    "marks_lost_on_assignment": Mutation(
        "absorbed_mla/checkpoint/parameter_marks.py",
        "vars(layer._parameters[name]).update(marks)",
        "vars(layer._parameters[name]).update({})",
    ),
    "halves_share_memory": Mutation(
        "absorbed_mla/checkpoint/parameter_marks.py",
        "state_dict[key] = tensor.clone()",
        "state_dict[key] = tensor",
    ),
    "a_hooks_tensor_is_rotated": Mutation(
        "absorbed_mla/linear.py",
        "return output if _makes_its_output(layer) else output.clone()",
        "return output",
    ),
    "boundaries_remembered_on_the_host": Mutation(
        "absorbed_mla/sequences.py",
        "if not cu_seqlens.is_cuda or cu_seqlens.is_inference():",
        "if cu_seqlens.is_inference():",
    ),
    "context_of_another_model": Mutation(
        "absorbed_mla/inference/caches/static.py",
        "if begun and last is not None and last() is not owner:",
        "if begun and last is None and last is not owner:",
    ),
    "choice_of_another_layout": Mutation(
        "absorbed_mla/core_attention/module.py",
        "(layout, batch, cp_size, self.training",
        "(batch, cp_size, self.training",
    ),
    "packs_with_an_old_cudnn": Mutation(
        "absorbed_mla/core_attention/module.py",
        '"packed": layout.packed or (cp_size > 1 and batch == 1),',
        '"packed": False,',
    ),
    "seed_is_ignored": Mutation(
        "absorbed_mla/generation/sampler.py",
        "uniform(request.seed, position), params.min_p",
        "uniform(0, position), params.min_p",
    ),
    "decode_loop_keeps_the_order_of_rows": Mutation(
        "absorbed_mla/generation/decode_loop/context_rows.py",
        "        if former:\n            self._move(former, places)",
        "        former = []",
    ),
    "decode_loop_moves_no_random_numbers": Mutation(
        "absorbed_mla/generation/decode_loop/draws.py",
        "            table[_RANDOM, self._sampled] = self._random\n            table[:, places]",
        "            table[:, places]",
    ),
    "decode_loop_moves_no_records": Mutation(
        "absorbed_mla/generation/decode_loop/loop.py", "members.move(*moved)", "pass"
    ),
    "decode_loop_takes_blocks_that_are_not_there": Mutation(
        "absorbed_mla/generation/decode_loop/context_rows.py",
        "<= allocator.active_count:\n            return True",
        "> 0:\n            return True",
    ),
    "decode_loop_hides_new_blocks": Mutation(
        "absorbed_mla/generation/decode_loop/context_rows.py",
        "self._table_changed = True",
        "self._table_changed = False",
    ),
    "decode_loop_attends_to_former_keys": Mutation(
        "absorbed_mla/generation/decode_loop/context_rows.py",
        "lengths[:n] = positions + 1",
        "lengths[:n] = positions",
    ),
    "decode_loop_admits_nobody": Mutation(
        "absorbed_mla/generation/decode_loop/loop.py", "if may_admit(host):", "if False:"
    ),
    "decode_loop_overlooks_stop_words": Mutation(
        "absorbed_mla/generation/decode_loop/loop.py", "or members.stops(listed)", "or False"
    ),
    "decode_loop_draws_too_early_stop_tokens": Mutation(
        "absorbed_mla/generation/decode_loop/draws.py",
        "self._own or self.changes or",
        "self._own or",
    ),
    "decode_loop_forgets_the_clock": Mutation(
        "absorbed_mla/generation/decode_loop/loop.py", "context.prefix_cache_lru_clock += 1", "pass"
    ),
    "staged_copy_waits_for_no_reader": Mutation(
        "absorbed_mla/inference/staging_ring.py", "self._streams.await_free(buffer)", "pass"
    ),
    "staged_window_is_read_at_once": Mutation(
        "absorbed_mla/inference/staging_ring.py", "self._streams.await_copied(self._taken)", "pass"
    ),
    "staged_copies_before_blocks_move": Mutation(
        "absorbed_mla/inference/staging_ring.py", "self._streams.begin()", "pass"
    ),
    "stop_string_shown_too_early": Mutation(
        "absorbed_mla/llm/completion.py",
        "self._text[: len(self._text) - self._held_back()]",
        "self._text",
    ),
    "disconnected_client_goes_on": Mutation(
        "absorbed_mla/llm/server/service.py",
        "self._commands.put(_Abort([names[i] for i in running]))",
        "            pass",
    ),
    "indexer_trains_the_model": Mutation(
        "absorbed_mla/dsa/indexer.py",
        "x, q_latent = x.detach(), q_latent.detach()",
        "pass",
    ),
    "indexer_rope_pairing": Mutation(
        "absorbed_mla/dsa/indexer.py", "transpose(-1, -2).flatten(-2)", "flatten(-2)"
    ),
    "ties_of_the_selection": Mutation(
        "absorbed_mla/dsa/selection.py",
        "(ties.cumsum(-1, dtype=torch.int32) <= missing)",
        "(ties.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= missing)",
    ),
    "hidden_keys_are_ties": Mutation(
        "absorbed_mla/dsa/selection.py", "(scores == last) & seen", "scores == last"
    ),
    "repeated_key_gradients": Mutation(
        "absorbed_mla/dsa/support.py", ".index_add_(0, places", ".index_copy_(0, places"
    ),
    "warm_up_moves_expert_biases": Mutation(
        "scripts/training/sparse_stage.py", "module.frozen_expert_bias = True", "pass"
    ),
    "recomputed_warm_up_stands_still": Mutation(
        "scripts/training/sparse_stage.py",
        "gpt.embedding.register_forward_hook(_with_gradient)",
        "pass",
    ),
    "parity_without_a_choice": Mutation(
        "absorbed_mla/dsa/core_attention.py",
        "return not request.batch_invariant or bool(",
        "return True or bool(",
    ),
    "parts_in_another_order": Mutation(
        "absorbed_mla/kernels/invariant/matrix_product.py",
        "            part = first + i\n",
        "            part = parts - 1 - first - i\n",
    ),
    "weight_twice_in_the_norm": Mutation(
        "absorbed_mla/kernels/invariant/rms_norm.py",
        "scale * (grad - normed * (",
        "scale * (grad - weight * normed * (",
    ),
    "micro_batches_overwritten": Mutation(
        "absorbed_mla/batch_invariant/te_gemm.py",
        "out.add_(result) if accumulate else",
        "out.copy_(result) if accumulate else",
    ),
    "operators_of_the_host_stay": Mutation(
        "absorbed_mla/batch_invariant/host_operators.py",
        "        megatron.disable_batch_invariant_mode()\n        for name, ours",
        "        for name, ours",
    ),
    "recall_of_one_head": Mutation(
        "absorbed_mla/dsa/indexer_loss.py",
        "part = probabilities(scores, lse).sum(1)",
        "part = probabilities(scores, lse).amax(1)",
    ),
    "indexer_gradient_of_some_ranks": Mutation(
        "absorbed_mla/dsa/indexer_loss.py", "*= self.factor * size", "*= self.factor"
    ),
    "target_of_own_heads": Mutation(
        "absorbed_mla/dsa/indexer_loss.py",
        "dist.reduce(total, group=self.tp_group, group_dst=owner)",
        "pass",
    ),
    "index_rows_at_other_positions": Mutation(
        "absorbed_mla/dsa/core_attention.py", "x[rank * count : (rank + 1) * count]", "x[:count]"
    ),
    "index_keys_in_another_order": Mutation(
        "absorbed_mla/context_parallel/strategies/all_gather.py",
        'return rank_major.index_select(0, self.layout.index("sequence_order", x.device))',
        "return rank_major",
    ),
    "loss_of_own_rows": Mutation(
        "absorbed_mla/dsa/core_attention.py",
        "max(1, sum(plan.layout.lengths) * kv.shape[1])",
        "max(1, len(kv) * kv.shape[1])",
    ),
    "target_over_other_keys": Mutation(
        "absorbed_mla/dsa/core_attention.py", "lse if over_attended else None", "lse"
    ),
    "shared_selection_of_another_microbatch": Mutation(
        "absorbed_mla/dsa/sharing.py",
        "latest.recomputation is not recomputation",
        "False",
    ),
    "recomputed_layer_chooses_again": Mutation(
        "absorbed_mla/dsa/sharing.py",
        "found, kept = self._next_replayed(device), True",
        "found, kept = self._next_replayed(device), False",
    ),
    "nobody_hears_of_the_death": Mutation(
        "absorbed_mla/llm/server/service.py",
        "            self._on_death()\n",
        "",
    ),
    "any_key_opens": Mutation(
        "absorbed_mla/llm/server/app.py",
        """raise HTTPException(401, "the API key is missing or wrong")""",
        "pass",
    ),
    "block_registered_twice": Mutation(
        "absorbed_mla/generation/blocks.py",
        "if known[i] != value",
        "if True",
    ),
    "peer_hides_the_killed_rank": Mutation(
        "absorbed_mla/llm/workers.py",
        "        if ended:\n            self._die(ended[0])\n",
        "",
    ),
    "fused_down_rows": Mutation(
        "absorbed_mla/tensor_parallel.py",
        "return x.split(list(widths), dim=-1)",
        "return x.split(list(widths)[::-1], dim=-1)[::-1]",
    ),
    "fused_down_rows_of_ranks": Mutation(
        "absorbed_mla/tensor_parallel.py", "    if shards == 1:\n", "    if shards >= 1:\n"
    ),
    "fused_down_in_checkpoints": Mutation(
        "absorbed_mla/checkpoint/sharded.py",
        "zip(parts, weight.split(rows))",
        "zip(parts, weight.split(rows[::-1])[::-1])",
    ),
    "hybrid_layer_halves": Mutation(
        "absorbed_mla/checkpoint/hybrid_names.py",
        'index = 2 * int(found["index"]) + _half(found["rest"])',
        'index = 2 * int(found["index"]) + 1 - _half(found["rest"])',
    ),
    "hybrid_fused_attention": Mutation(
        "specs/absorbed_mla_hybrid_specs.py",
        "submodules=TransformerLayerSubmodules(self_attention=unused)",
        "submodules=None",
    ),
    "layer_kind_by_its_place_in_the_stage": Mutation(
        "specs/absorbed_mla_layers.py",
        "moe_layers(config)[number - 1]",
        "moe_layers(config)[layer_number - 1]",
    ),
    "mtp_options_on_a_stage_without_layers": Mutation(
        "specs/absorbed_mla_gpt_builder.py",
        'getattr(spec, "parts", None) or ',
        "",
    ),
}


def pytest(paths: list[str], processes: int = 1) -> list[str]:
    """The command that runs these tests until the first failure."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else [])]
    command += ["-m", "pytest", "-x", "-q", "-W", "ignore", *paths]
    # The tests of the list above would notice whatever is broken.
    return [*command, "--deselect", "tests/unit/project/test_mutations.py"]


SUITES = {
    "tests/unit": pytest(["tests/unit"]),
    "tests/distributed (TP=2)": pytest(["tests/distributed"], processes=2),
}


def main() -> int:
    """Run the chosen mutations and report; returns the exit code."""
    return run_script("mutation_check.py", _check)


def _check() -> int:
    parser = Parser("mutation_check.py", __doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MUTATIONS)} (default: all)")
    parser.add_argument(
        "--tests", nargs="+", metavar="FILE", help="run these files only (default: all tests)"
    )
    parser.add_argument("--processes", type=int, default=1, help="for --tests")
    arguments = parser.parse_args()
    names = arguments.names or list(MUTATIONS)
    unknown = sorted(set(names) - set(MUTATIONS))
    if unknown:
        parser.error(f"unknown mutation {', '.join(unknown)}; known are {', '.join(MUTATIONS)}")
    suites = SUITES
    if arguments.tests:
        suites = {"the chosen files": pytest(arguments.tests, arguments.processes)}
    if first_failure("(nothing broken)", None, suites):
        parser.error("the tests fail without any mutation; mend that first")
    caught = [first_failure(name, MUTATIONS[name], suites) for name in names]
    return 0 if all(caught) else 1


def first_failure(name: str, mutation: Mutation | None, suites: dict[str, list[str]]) -> str | None:
    """The first test of ``suites`` that fails under ``mutation``, printed as it is found."""
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        if mutation:
            mutate(copy / mutation.file, mutation)
        for suite, command in suites.items():
            failure = run_until_failure(command, copy)
            if failure:
                print(f"{name:24s} caught in {suite} by {failure}", flush=True)
                return failure
    print(f"{name:24s} not caught", flush=True)
    return None


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks or would track, as it is in the working tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def mutate(target: Path, mutation: Mutation) -> None:
    """Write the wrong line; the right one must be there exactly once."""
    source = target.read_text()
    if source.count(mutation.right) != 1:
        raise SystemExit(f"{mutation.file} does not hold {mutation.right!r} once; update the list")
    target.write_text(source.replace(mutation.right, mutation.wrong))


def run_until_failure(command: list[str], folder: Path) -> str | None:
    """The id of the first failed test, or None if all passed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=ends_with_this_process(),
    )
    if result.returncode == 0:
        return None
    # Only a failed test counts; a broken environment or a syntax error proves nothing.
    found = re.search(r"^FAILED (.+?)(?: - |$)", result.stdout, re.MULTILINE)
    if not found:
        raise SystemExit(f"{' '.join(command)} did not run:\n{result.stdout}\n{result.stderr}")
    return found.group(1)


if __name__ == "__main__":
    leave(main())
