"""Exchanges between ranks that share tokens."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
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
    "gathered_in_the_wrong_memory": Mutation(
        "absorbed_mla/context_parallel/choice.py",
        "keep and gathered <= own",
        "keep",
    ),
    "divided_mlp_summed_twice": Mutation(
        "absorbed_mla/serving/data_parallel_attention/mlp.py",
        "        last.explicit_expert_comm = True",
        "        pass",
    ),
    "divided_tokens_keep_their_padding": Mutation(
        "absorbed_mla/serving/data_parallel_attention/exchange.py",
        "torch.cat([part[:count] for part, count in zip(parts, counts)])",
        "parts.flatten(0, 1)[: sum(counts)]",
    ),
    "divided_vocabulary_in_the_order_of_tokens": Mutation(
        "absorbed_mla/serving/data_parallel_attention/exchange.py",
        "found.transpose(0, 1).flatten(1)",
        "found.reshape(counts[self.rank], -1)",
    ),
    "divided_embedding_of_foreign_tokens": Mutation(
        "absorbed_mla/serving/data_parallel_attention/vocabulary.py",
        "found = found.masked_fill(elsewhere.unsqueeze(-1), 0)",
        "pass",
    ),
    "divided_experts_with_all_probabilities": Mutation(
        "absorbed_mla/serving/data_parallel_attention/dispatcher.py",
        "probs[:, own[0] : own[-1] + 1].T.flatten()",
        "probs[:, : len(own)].T.flatten()",
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
    "index_keys_in_another_order": Mutation(
        "absorbed_mla/context_parallel/strategies/all_gather.py",
        'return rank_major.index_select(0, self.layout.index("sequence_order", x.device))',
        "return rank_major",
    ),
    "prompts_of_few_tokens_divided": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "if tokens < LEAST_TOKENS or tokens %",
        "if tokens %",
    ),
    "decode_steps_divided": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py", " or context.is_decode_only():", ":"
    ),
    "runs_of_a_rank_begin_at_zero": Mutation(
        "absorbed_mla/inference/prefill_context_parallel.py",
        "before += own.stop - own.start",
        "before += 0",
    ),
}
