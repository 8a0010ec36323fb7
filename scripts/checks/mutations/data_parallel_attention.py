"""Attention on every rank, other weights divided over the ranks."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "divided_counts_wait_in_graphs": Mutation(
        "absorbed_mla/serving/data_parallel_attention/exchange.py",
        "        if this_run() is not None:",
        "        if False:",
    ),
    "divided_vocabulary_rows_of_rank_0": Mutation(
        "absorbed_mla/serving/data_parallel_attention/exchange.py",
        "found.unflatten(0, (self.size, -1))[:, : counts[self.rank]]",
        "found.unflatten(0, (self.size, -1))[:, : counts[0]]",
    ),
    "divided_embedding_of_one_token_more": Mutation(
        "absorbed_mla/serving/data_parallel_attention/vocabulary.py",
        "(ids >= end)",
        "(ids > end)",
    ),
    "divided_logits_of_as_many_tokens": Mutation(
        "absorbed_mla/serving/data_parallel_attention/vocabulary.py",
        "counts = self.exchange.counts(len(rows))",
        "counts = self.exchange.tokens",
    ),
    "padded_experts_summed_over_tokens": Mutation(
        "absorbed_mla/serving/data_parallel_attention/dispatcher.py",
        "hidden_states.unflatten(0, (self.num_local_experts, -1)).sum(0)",
        "hidden_states.unflatten(0, (-1, self.num_local_experts)).sum(1)",
    ),
    "divided_shared_experts_summed_twice": Mutation(
        "absorbed_mla/serving/data_parallel_attention/mlp.py",
        "            leave_partial(self.shared_experts)",
        "            pass",
    ),
    "divided_vocabulary_with_a_rest": Mutation(
        "absorbed_mla/serving/data_parallel_attention/model.py",
        "    if vocabulary % exchange.size:",
        "    if False:",
    ),
}
