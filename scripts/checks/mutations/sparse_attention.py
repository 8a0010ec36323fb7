"""Sparse attention."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "fp8_holes_of_a_selection": Mutation(
        "absorbed_mla/dsa/cached_attention.py",
        "masked_fill(subset.indices < 0, -1)",
        "masked_fill(subset.indices < 0, 0)",
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
        "absorbed_mla/dsa/key_subset.py", ".index_add_(0, places", ".index_copy_(0, places"
    ),
    "parity_without_a_choice": Mutation(
        "absorbed_mla/dsa/implementations.py",
        "return not request.batch_invariant or bool(",
        "return True or bool(",
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
        "absorbed_mla/dsa/sequence_parallel.py", "x[rank * count : (rank + 1) * count]", "x[:count]"
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
        "absorbed_mla/dsa/index_sharing.py",
        "self._shared().scope is not scope",
        "False",
    ),
    "recomputed_layer_chooses_again": Mutation(
        "absorbed_mla/dsa/index_sharing.py",
        "return self.shares or self.replayed is not None",
        "return self.shares",
    ),
}
