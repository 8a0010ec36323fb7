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
    "hybrid_layer_halves": Mutation(
        "absorbed_mla/checkpoint/hybrid_names.py",
        'index = 2 * int(found["index"]) + _half(found["rest"])',
        'index = 2 * int(found["index"]) + 1 - _half(found["rest"])',
    ),
}
