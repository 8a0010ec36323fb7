"""Checkpoints of a layer."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "kv_row_interleave": Mutation(
        "absorbed_mla/checkpoint/layout.py",
        "for part, count in zip(by_head.split(one_head, 1), rows)",
        "for part, count in zip(whole.split(rows, 0), rows)",
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
    "fused_down_in_checkpoints": Mutation(
        "absorbed_mla/checkpoint/sharded.py",
        "zip(parts, weight.split(rows))",
        "zip(parts, weight.split(rows[::-1])[::-1])",
    ),
    "mtp_layers_of_any_kind": Mutation(
        "checkpoint_conversion/mapping.py",
        "moe = bool(config.moe_layers) and config.moe_layers[-1]",
        "moe = any(config.moe_layers)",
    ),
    "heads_of_mtp_layers_without_ties": Mutation(
        "checkpoint_conversion/mapping.py",
        '"model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"',
        '"lm_head.weight"',
    ),
    "heads_of_mtp_layers_are_embeddings": Mutation(
        "checkpoint_conversion/mapping.py",
        '"model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"',
        '"model.embed_tokens.weight"',
    ),
    "scaling_factor_of_another_model": Mutation(
        "checkpoint_conversion/models/glm4_moe_lite.py",
        '"routed_scaling_factor": 1.8',
        '"routed_scaling_factor": 1.0',
    ),
    "routing_is_not_in_the_arguments": Mutation(
        "checkpoint_conversion/routing.py",
        "own[GROUP_SCORE] = routing.group_score_topk",
        "pass",
    ),
    "normalisation_is_not_in_the_arguments": Mutation(
        "checkpoint_conversion/routing.py",
        "own[NORMALISED] = routing.norm_topk_prob",
        "pass",
    ),
    "megatrons_routing_in_config_json": Mutation(
        "checkpoint_conversion/convert.py",
        "problems = only_megatrons(checkpoint.config)",
        "problems = []",
    ),
    "beta_of_yarn_is_zero": Mutation(
        "checkpoint_conversion/rotary.py",
        'section.number("beta_fast", 1e-6',
        'section.number("beta_fast", 0.0',
    ),
    "hybrid_layer_halves": Mutation(
        "absorbed_mla/checkpoint/hybrid_names.py",
        'index = 2 * int(found["index"]) + _half(found["rest"])',
        'index = 2 * int(found["index"]) + 1 - _half(found["rest"])',
    ),
}
