"""The layer, its specs, optimizer hooks, parity mode, installation."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
absorbed_mla/absorb.py
  last_token_of_head_weights_lost: (x[:-1], x[-1:]) -> (x[:-1], 0 * x[-1:])
  head_product_of_one_token: x[part], grad[part] -> x[part][:1], grad[part][:1]
  inference_copies_heads_first: _contiguous_product(q_nope, w_uk) -> absorb_query(q_nope, w_uk)
  absorption_looks_at_gradients: return _head_product("sbnd,ndc->sbnc", q_nope, w_uk)
    -> if q_nope.is_cuda and not torch.is_grad_enabled():
    |        return absorb_query_in_inference(q_nope, w_uk)
    |    return _head_product("sbnd,ndc->sbnc", q_nope, w_uk)
absorbed_mla/attention.py
  fp8_training_not_rounded: kv = self.cached_attention.rounded(kv) -> pass
  inference_under_context_parallelism: cp_size=self.context_parallel.size -> cp_size=1
  output_projection_initialised_too_wide: config.output_layer_init_method -> config.init_method
  whole_iterations_trained: refuse_full_iterations(self.config) ->
  offloaded_inputs_that_are_recomputed: recomputed = (kv, *query) if up_project else ()
    -> recomputed = ()
  cached_keys_are_rotated_in_any_layer: rotation = self._rotation(*cos_sin) -> rotation = cos_sin
absorbed_mla/batch_invariant/megatron_operators.py
  operators_of_the_host_stay: megatron.disable_batch_invariant_mode()
    |        for name, operator
    -> for name, operator
absorbed_mla/batch_invariant/parallel_linear.py
  sums_of_ranks_rounded: share.total(found.view( -> share.total(found.to(x.dtype).view(
absorbed_mla/batch_invariant/parts.py
  gates_and_up_projections_in_other_parts: pieces[part::number]
    -> pieces[part * stride : (part + 1) * stride]
absorbed_mla/batch_invariant/te_gemm.py
  micro_batches_overwritten: add_(result) if accumulate else -> copy_(result) if accumulate else
absorbed_mla/batch_invariant/tree.py
  parts_added_one_after_the_other: list(summands) -> [sum(summands[1:], summands[0])]
absorbed_mla/convert_command.py
  hidden_package_in_the_converter: ("checkpoint_conversion") -> ()
absorbed_mla/deepseek_router.py
  router_ranks_groups_as_megatron: group_score_topk or topk // group_topk -> topk // group_topk
  router_normalises_as_megatron: if norm_topk_prob is not None: -> if False:
  router_replays_nothing: if router_replay is None: -> if True:
  routing_without_keyword_defaults: routing.__kwdefaults__ = host.__kwdefaults__ ->
absorbed_mla/dims.py
  softmax_scale: math.sqrt(dims.qk_head_dim) -> math.sqrt(dims.kv_down_dim)
  softmax_mscale: config.mscale_all_dim -> config.mscale
absorbed_mla/fp8_latents.py
  fp8_zeros_have_no_scale: .clamp(min=LEAST) -> .clamp(min=0.0)
  fp8_latents_have_no_gradient: return grad, None -> return torch.zeros_like(grad), None
  fp8_rows_of_other_alignment: _ALIGNMENT = 16 -> _ALIGNMENT = 8
  fp8_scales_off_their_places: if self.kv_lora_rank % _SCALE_BYTES: -> if False:
  fp8_scales_in_the_models_dtype: parts.scales[..., None] -> parts.scales.to(kv.dtype)[..., None]
absorbed_mla/graph_capture.py
  gradients_of_recomputation_in_graphs: return inputs
    -> return inputs
    |    return inputs
  mask_of_a_capture: if is_graph_capturing():
    |        return None
    -> if is_graph_capturing():
    |        return attention_mask
  training_graphs_of_everything: return not modules or any( -> return any(
  training_graphs_in_fp8: "fp8": (None, "FP8 was not tried in such graphs"), ->
  recomputed_gradients_stay: parameter.grad = None -> pass
absorbed_mla/linear.py
  fused_accumulation_off_for_all: maker_config = copy.copy(config) -> maker_config = config
  a_hooks_tensor_is_rotated: output if _makes_its_output(layer) else output.clone() -> output
absorbed_mla/lora/adapter.py
  lora_of_a_fused_layer_merged_into_the_first_rows: start += rows -> pass
absorbed_mla/lora/forms.py
  lora_of_the_latent_loses_its_gradient: d_latent + d_low @ a.to(d_low.dtype) -> d_latent
absorbed_mla/lora/low_rank.py
  lora_a_of_heads_is_not_summed: a = copy_to_tensor_model_parallel_region(
    -> a = (lambda x, group: x)(
  lora_b_of_few_tokens_is_not_summed: "lora_B": (DUPLICATED, ROW) -> "lora_B": (DUPLICATED,)
absorbed_mla/lora/peft_format.py
  kv_b_written_as_of_one_a: if torch.equal(k.a, v.a): -> if True:
absorbed_mla/lora/slots.py
  layers_in_one_product_share_their_ranks: first = i * self._ranks + -> first =
  parity_of_adapters_scaled_before_rounding: if parity and one.sharding -> if False and one.sharding
  tokens_of_the_first_adapter: rows = [slots.get(number, -1) for -> rows = [0 for
absorbed_mla/megatron_interface.py
  clipped_below_an_adapter: if others: -> if False:
absorbed_mla/megatron_names.py
  missing_names_raise_later: if missing := self.missing(owners): -> if missing := "":
absorbed_mla/muon/optimizer_hook.py
  muon_choice_dropped: if layer.update != "auto": -> if False:
absorbed_mla/muon/orthogonalization_groups.py
  muon_rows_by_head: (per_head, dim=1).flatten(0, 1) -> ([part.flatten(0, 1) for part in per_head])
absorbed_mla/muon/step.py
  muon_states_are_joined: if state: -> if False:
absorbed_mla/norm.py
  norms_whose_hooks_wait: and not (norm._forward_hooks or norm._forward_pre_hooks) ->
absorbed_mla/offloading.py
  offloaded_weights: kept = (*kept, *self._parameters()) -> kept = (*kept,)
  offloading_while_it_is_off: if not getattr(manager, "inside_context", False): -> if False:
  offloading_of_all_stages: if name not in self._stages or not torch -> if not torch
  offloaded_views_of_weights: if tensor.untyped_storage().data_ptr() in -> if tensor.data_ptr() in
  offloaded_inputs_of_recomputation: with saved_tensors_hooks(_same, _same):
    |        return function(*args)
    -> return function(*args)
absorbed_mla/once_differentiable.py
  second_derivatives_pruned: (found, (*grads, *ctx.saved_tensors)) -> (found, grads)
absorbed_mla/output_gate.py
  gate_gradient_of_another_function: gate * (1 - gate) -> gate * gate
  gate_rounded_before_the_product: .sigmoid().unsqueeze(-1) -> .sigmoid().bfloat16().unsqueeze(-1)
absorbed_mla/own_packages.py
  hidden_package_passes: if not any(_same(own, place) for place in found): -> if not found:
absorbed_mla/packed_roll.py
  packed_roll_names_no_cause: except ValueError as error: -> except AttributeError as error:
  mtp_shifts_padding_into_documents: num_tokens - 1), left <= 1 -> num_tokens - 1), left <= 0
  mtp_weighs_a_prefix_by_one_answer: index_add(-1, step.branches, pack[..., step.siblings])
    -> clone()
  mtp_losses_over_a_ranks_tokens: or not rolled.is_floating_point() -> or True
  mtp_weights_multiplied_at_each_depth: rolled if isinstance(tensor, _LossWeights) else rolled *
    -> rolled *
  mtp_per_token_as_often_as_ranks: found._sum = total / group.size() -> found._sum = total
  mtp_padding_as_tokens: found | (values & step.padding) if values.dtype is torch.bool else found
    -> found
  mtp_shift_within_a_rank: part.tokens(), part.sequence_order() -> part.tokens(), part.rank_major()
absorbed_mla/packed_router.py
  recomputed_routers_count_once: scope.kept.setdefault(self, self._counts) -> self._counts
  every_rank_counts_the_first_ones:
    - values.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
    -> values.chunk(size)[0]
  packs_lose_the_router: and submodules.router is TopKRouter ->
  router_of_mtp_counts_padding: getattr(layer.submodules, "mtp_model_layer", layer) -> layer
absorbed_mla/projections.py
  q_norm_summed_by_host: average_gradients_across_tp_domain=True ->
absorbed_mla/query_scaling.py
  factors_made_in_generation: with torch.inference_mode(False): -> if True:
  scaled_queries_with_the_gradient_of_others: return grad.mul_(ctx.saved_tensors[0]) -> return grad
  factors_of_tokens_of_other_ranks: [found[own] for own in step.shares.own]
    -> [found[: len(query)]]
absorbed_mla/recomputed_outputs.py
  recomputed_outputs_of_any_layout: assert layout == self._layout -> assert layout
  recomputed_outputs_without_their_strides: x.storage_offset(), *walked -> (x.storage_offset(),)
absorbed_mla/rope.py
  rope_pairing: x[..., 0::2].to(compute), x[..., 1::2].to(compute)
    -> (half.to(compute) for half in x.chunk(2, dim=-1))
  rotated_gradient: cos, sin, back=True) -> cos, sin, back=False)
  rotated_view: x.clone() if x._is_view() else x -> x
  angles_in_fp32: torch.outer(torch.arange(size, dtype=torch.float64), frequencies.clone())
    -> torch.outer(torch.arange(size, dtype=torch.float32), frequencies.float())
  yarn_clamped_to_pairs: qk_pos_emb_head_dim - 1 -> qk_pos_emb_head_dim // 2 - 1
  layer_of_another_number: pattern[layer_number - 1] -> pattern[0]
absorbed_mla/router_replay.py
  recomputed_layers_choose_experts: scope.kept[self] = given -> scope.kept[self] = None
  padding_goes_to_expert_0: torch.where(given < 0, own, given) -> given.clamp(min=0)
  stages_replay_the_first_layers: [places[router.layer_number] for router in routers]
    -> list(range(len(routers)))
absorbed_mla/sequences.py
  layouts_of_other_trees_are_equal: tree: PrefixTree | None = None
    -> tree: PrefixTree | None = field(default=None, compare=False)
  boundaries_remembered_on_the_host: if not cu_seqlens.is_cuda or cu_seqlens -> if cu_seqlens
absorbed_mla/shared_prefix_log_probs.py
  log_probs_of_prefixes_by_cross_entropy: if is_enabled(logits.device): -> if False:
  gradients_of_chosen_rows_once_per_rank: tensor_parallel_output_grad=False
    -> tensor_parallel_output_grad=True
  mtp_of_a_prefix_that_forks_too_late: moved = 1 + config.mtp_num_layers
    -> moved = config.mtp_num_layers
  experts_count_prefixes_once: expand.bincount(minlength=tree.num_tokens)[own]
    -> torch.ones_like(own)
absorbed_mla/standard_mla.py
  standard_models_roll_as_megatron: correct_packed_roll()
    |    use_te
    -> use_te
absorbed_mla/tensor_parallel.py
  k_rope_reduction_sp: tensor_parallel_output_grad=not summed -> tensor_parallel_output_grad=False
  k_rope_reduction_no_sp: x if summed else copy_to_tensor_model_parallel_region(x, group=tp_group)
    -> x
  fused_down_rows: x.split(list(widths), dim=-1) -> x.split(list(widths)[::-1], dim=-1)[::-1]
  fused_down_rows_of_ranks: if shards == 1: -> if shards >= 1:
absorbed_mla/testing/indexer_recall.py
  recall_in_a_step_of_generation: _refuse_cached  # type -> layer.choose_cached_keys  # type
  recall_of_one_ranks_heads: dist.all_reduce(mass, group=tp_group) -> pass
absorbed_mla/unsupported.py
  tied_embeddings_on_the_stage_of_mtp:
    - if layout is None or layout.layout[-1][-1].count(LayerType.mtp):
    -> if False:
specs/absorbed_mla_gpt_builder.py
  mtp_options_on_a_stage_without_layers: getattr(spec, "parts", None) or ->
specs/absorbed_mla_hybrid_specs.py
  hybrid_experts_with_megatrons_router: else _moe_layer(parts) -> else {}
  hybrid_fused_attention: TransformerLayerSubmodules(self_attention=unused) -> None
specs/absorbed_mla_layer_specs.py
  layer_spec_of_one_kind: if len(kinds) > 1: -> if False:
specs/absorbed_mla_layers.py
  layer_kind_by_its_place_in_the_stage: (config)[number - 1] -> (config)[layer_number - 1]
specs/absorbed_mla_parts.py
  router_options_of_dense_models: if given and not config.num_moe_experts:
    -> if False:
  mtp_shift_not_corrected: correct_packed_roll()  # Here -> # Here
"""
)
