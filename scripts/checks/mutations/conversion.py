"""Checkpoints and their conversion."""

from __future__ import annotations

from checks.mutations.table import read

MUTATIONS = read(
    r"""
absorbed_mla/bridge/__init__.py
  bridges_hide_the_converter: ("checkpoint_conversion", "specs") -> ("specs")
absorbed_mla/checkpoint/hybrid_names.py
  hybrid_layer_halves: 2 * int(found["index"]) + _half -> 2 * int(found["index"]) + 1 - _half
absorbed_mla/checkpoint/layout.py
  kv_row_interleave: in zip(by_head.split(one_head, 1), rows) -> in zip(whole.split(rows, 0), rows)
absorbed_mla/checkpoint/parameter_marks.py
  marks_lost_on_assignment: update(marks) -> update({})
  halves_share_memory: state_dict[key] = tensor.clone() -> state_dict[key] = tensor
absorbed_mla/checkpoint/sharded.py
  fused_down_in_checkpoints: (parts, weight.split(rows)) -> (parts, weight.split(rows[::-1])[::-1])
  extra_state_of_a_wrapped_layer: (prefix + "linear_") and -> (prefix + "linear_kv_down_proj._") and
checkpoint_conversion/config_fields.py
  fields_have_deepseeks_names: own, alias = self._names.get(name, name), -> own, alias = name,
  defaults_of_models_are_ignored: self._defaults.get(name, default) -> default
  zero_is_false: and not (boolean and self.equals(name, value)) -> and not self.equals(name, value)
checkpoint_conversion/convert.py
  megatrons_routing_in_config_json: problems = only_megatrons(checkpoint.config) -> problems = []
checkpoint_conversion/expert_stacks.py
  experts_in_stacks_of_other_shapes: or result[name].shape != (len(experts), parts * rows, columns)
    -> or False
checkpoint_conversion/formats/megatron_folder.py
  megatron_configs_of_another_router:
    - refuse_another_function(config, args, _ANOTHER_FUNCTION.format(path=path))
    ->
checkpoint_conversion/formats/vocabulary_padding.py
  tokens_of_the_own_config_are_dropped: if CONFIG in auxiliary: -> if False:
  tokens_of_the_arguments_are_dropped: args.get("vocab_size") -> args.get("")
  any_number_of_rows_is_padding: 0 < multiple * tp <= padding -> 0 < multiple * tp < 0
checkpoint_conversion/hub_cache.py
  snapshots_read_any_link: return file.is_relative_to(model / _BLOBS) -> return True
  snapshots_of_any_folder: and model.name.startswith(_MODEL): -> :
checkpoint_conversion/lazy_tensor.py
  parts_of_copies_are_not_compared:
    - return same_values([tensor.narrow(dim, start, length) for tensor in tensors], problem)
    -> return first.narrow(dim, start, length)
checkpoint_conversion/mapping.py
  mtp_layers_of_any_kind: moe = bool(config.moe_layers) and config.moe_layers[-1]
    -> moe = any(config.moe_layers)
  heads_of_mtp_layers_without_ties:
    - "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    -> "lm_head.weight"
  heads_of_mtp_layers_are_embeddings:
    - "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    -> "model.embed_tokens.weight"
  tied_heads_are_not_compared: [first] = same_values(copies, _DIFFERS) -> [first] = copies[0]
  tied_heads_of_megatron_are_unknown: in (own, [row.megatron for row in rows]): -> in (own,):
  tied_heads_are_other_tensors: if row.hugging_face == name -> if row.hugging_face != name
  models_have_names_of_the_table: return config.model.tensors.get(name, name) -> return name
  mtp_layers_that_files_hold: return count -> return 0
  rotary_halves_stay_halves: (-1, 2) if back else (2, -1) -> (2, -1) if back else (-1, 2)
checkpoint_conversion/mapping_table.py
  weights_of_heads_are_quantised: "indexer", float32=True -> "indexer", float32=True, fp8=True
  weights_of_heads_are_rounded: "indexer", float32=True -> "indexer"
checkpoint_conversion/megatron_args.py
  converted_queries_are_not_scaled: for name in LAYER_OPTIONS} -> for name in LAYER_OPTIONS[1:]}
  frequencies_are_not_divided: for name in LAYER_OPTIONS} -> for name in LAYER_OPTIONS[:1]}
checkpoint_conversion/model.py
  values_that_no_model_may_have: inner.only(name, only.value, only.accepted) -> pass
  epsilon_of_the_undivided_stream: / residual**2, -> ,
  dense_models_have_experts: if not model.experts or -> if
checkpoint_conversion/packed.py
  codes_in_the_other_order: codes & 15], values[codes >> 4] -> codes >> 4], values[codes & 15]
  halfway_is_rounded_up: (size * 2).round_() -> (size * 2 + 0.5).floor_()
  equal_groups_get_other_scales: torch.where(kept, scale[part] -> torch.where(~kept, scale[part]
  sizes_of_codes_are_not_read: tolist()) != self.shape: -> tolist()) == ():
checkpoint_conversion/quantisation.py
  order_of_activations: "actorder": None, ->
  groups_of_a_channel: if not weights.given(field) and -> if
checkpoint_conversion/model_type.py
  images_are_weights_of_the_text_model: None if name.startswith(images) else model -> model
checkpoint_conversion/models/glm4_moe_lite.py
  scaling_factor_of_another_model: "routed_scaling_factor": 1.8 -> "routed_scaling_factor": 1.0
checkpoint_conversion/rotary.py
  beta_of_yarn_is_zero: section.number("beta_fast", 1e-6 -> section.number("beta_fast", 0.0
checkpoint_conversion/routing.py
  routing_is_not_in_the_arguments: own[GROUP_SCORE] = routing.group_score_topk -> pass
  normalisation_is_not_in_the_arguments: own[NORMALISED] = routing.norm_topk_prob -> pass
"""
)
