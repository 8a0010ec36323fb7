"""Experts that are computed together."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "grouped_experts_balanced_by_more_than_scores": Mutation(
        "absorbed_mla/serving/experts/router.py",
        "if set(kinds) - _BY_SCORE:",
        "if False:",
    ),
    "grouped_experts_without_a_clamp": Mutation(
        "absorbed_mla/serving/experts/experts.py",
        '    "activation_func_clamp_value": (None,),\n',
        "",
    ),
    "grouped_experts_not_summed_over_ranks": Mutation(
        "absorbed_mla/serving/experts/dispatcher.py",
        "        if self._several:\n",
        "        if self._divided:\n",
    ),
    "few_rows_of_the_second_expert": Mutation(
        "absorbed_mla/kernels/moe/skinny_gemm.py",
        "ends_ptr + expert - 1, mask=expert > 0",
        "ends_ptr + expert - 1, mask=expert > 1",
    ),
    "one_expert_with_probability_one": Mutation(
        "absorbed_mla/kernels/moe/choice.py",
        "(not softmax and topk > 1) if normalize is None",
        "not softmax if normalize is None",
    ),
    "chosen_expert_without_a_number": Mutation(
        "absorbed_mla/kernels/moe/choice.py",
        "tl.where(key == key, key, -1e30)",
        "key",
    ),
    "experts_of_lower_ranks_stand_first": Mutation(
        "absorbed_mla/kernels/moe/order.py",
        "(expert < 0) | (expert >= count)",
        "expert >= count",
    ),
    "router_logits_behind_the_last_summand": Mutation(
        "absorbed_mla/kernels/moe/logits.py",
        "end = tl.minimum(first + steps_of_part * SUMMANDS, width)",
        "end = first + steps_of_part * SUMMANDS",
    ),
}
