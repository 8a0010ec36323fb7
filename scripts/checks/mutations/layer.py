"""The layer's own files, specs, optimizer and training script."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "recomputed_outputs_of_any_layout": Mutation(
        "absorbed_mla/recomputed_outputs.py",
        "assert layout == self._layout",
        "assert layout",
    ),
    "recomputed_outputs_without_their_strides": Mutation(
        "absorbed_mla/recomputed_outputs.py",
        "return x.storage_offset(), *walked",
        "return (x.storage_offset(),)",
    ),
    "router_ranks_groups_as_megatron": Mutation(
        "absorbed_mla/deepseek_router.py",
        "group_score_topk or topk // group_topk",
        "topk // group_topk",
    ),
    "router_normalises_as_megatron": Mutation(
        "absorbed_mla/deepseek_router.py",
        "    if norm_topk_prob is not None:\n",
        "    if False:\n",
    ),
    "router_replays_nothing": Mutation(
        "absorbed_mla/deepseek_router.py", "if router_replay is None:", "if True:"
    ),
    "packs_lose_the_router": Mutation(
        "absorbed_mla/packed_router.py", " and submodules.router is TopKRouter", ""
    ),
    "router_options_of_dense_models": Mutation(
        "specs/absorbed_mla_parts.py",
        "if self.options.chooses_experts and not config.num_moe_experts:",
        "if False:",
    ),
    "layer_spec_of_one_kind": Mutation(
        "specs/absorbed_mla_layer_specs.py", "    if len(kinds) > 1:\n", "    if False:\n"
    ),
    "hybrid_experts_with_megatrons_router": Mutation(
        "specs/absorbed_mla_hybrid_specs.py", "else _moe_layer(parts)", "else {}"
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
        "absorbed_mla/muon/orthogonalization_groups.py",
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
    "q_norm_summed_by_host": Mutation(
        "absorbed_mla/projections.py",
        "average_gradients_across_tp_domain=True",
        "",
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
    "head_product_of_one_token": Mutation(
        "absorbed_mla/absorb.py",
        '"sbnk,sbnc->nkc", x, grad',
        '"sbnk,sbnc->nkc", x[:1], grad[:1]',
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
    "output_projection_initialised_too_wide": Mutation(
        "absorbed_mla/attention.py",
        "init_method=config.output_layer_init_method",
        "init_method=config.init_method",
    ),
    "second_derivatives_pruned": Mutation(
        "absorbed_mla/once_differentiable.py",
        "return _refuse_derivatives(found, (*grads, *ctx.saved_tensors))",
        "return _refuse_derivatives(found, grads)",
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
    "warm_up_moves_expert_biases": Mutation(
        "absorbed_mla/dsa/warm_up.py", "module.frozen_expert_bias = True", "pass"
    ),
    "recomputed_warm_up_stands_still": Mutation(
        "absorbed_mla/dsa/warm_up.py",
        "            module.register_forward_hook(_with_gradient)",
        "            pass",
    ),
    "micro_batches_overwritten": Mutation(
        "absorbed_mla/batch_invariant/te_gemm.py",
        "out.add_(result) if accumulate else",
        "out.copy_(result) if accumulate else",
    ),
    "operators_of_the_host_stay": Mutation(
        "absorbed_mla/batch_invariant/megatron_operators.py",
        "        megatron.disable_batch_invariant_mode()\n        for name, operator",
        "        for name, operator",
    ),
    "fused_down_rows": Mutation(
        "absorbed_mla/tensor_parallel.py",
        "return x.split(list(widths), dim=-1)",
        "return x.split(list(widths)[::-1], dim=-1)[::-1]",
    ),
    "fused_down_rows_of_ranks": Mutation(
        "absorbed_mla/tensor_parallel.py", "    if shards == 1:\n", "    if shards >= 1:\n"
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
    "standard_models_roll_as_megatron": Mutation(
        "absorbed_mla/standard_mla.py",
        "    correct_packed_roll()\n    use_te",
        "    use_te",
    ),
    "packed_roll_names_no_cause": Mutation(
        "absorbed_mla/packed_roll.py",
        "    except ValueError as error:\n",
        "    except AttributeError as error:\n",
    ),
    "masks_answer_for_other_queries": Mutation(
        "absorbed_mla/core_attention/masks/redundant.py",
        " or known_queries is not queries:",
        ":",
    ),
    "routing_without_keyword_defaults": Mutation(
        "absorbed_mla/deepseek_router.py",
        "    routing.__kwdefaults__ = host.__kwdefaults__\n",
        "",
    ),
    "generation_chooses_without_megatron": Mutation(
        "absorbed_mla/serving/experts/router.py",
        "        if self.options.chooses_experts:\n",
        "        if True:\n",
    ),
    "inference_copies_heads_first": Mutation(
        "absorbed_mla/absorb.py",
        "    return _contiguous_product(q_nope, w_uk)\n",
        "    return absorb_query(q_nope, w_uk)\n",
    ),
    "absorption_looks_at_gradients": Mutation(
        "absorbed_mla/absorb.py",
        '    return torch.einsum("sbnd,ndc->sbnc", q_nope, w_uk)\n',
        "    if q_nope.is_cuda and not torch.is_grad_enabled():\n"
        "        return absorb_query_in_inference(q_nope, w_uk)\n"
        '    return torch.einsum("sbnd,ndc->sbnc", q_nope, w_uk)\n',
    ),
}
