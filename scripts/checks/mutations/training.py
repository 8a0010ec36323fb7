"""What surrounds the layer in training: multi-token prediction, optimizers, adapters, warm-up."""

from __future__ import annotations

from checks.mutations.mutation import Mutation

MUTATIONS = {
    "mtp_shifts_padding_into_documents": Mutation(
        "absorbed_mla/packed_roll.py", "(left <= 1).to(device)", "(left <= 0).to(device)"
    ),
    "mtp_padding_as_tokens": Mutation(
        "absorbed_mla/packed_roll.py",
        "found | (values & step.padding) if values.dtype is torch.bool else found",
        "found",
    ),
    "mtp_shift_within_a_rank": Mutation(
        "absorbed_mla/packed_roll.py",
        "own, places = part.tokens(), part.sequence_order()",
        "own, places = part.tokens(), part.rank_major()",
    ),
    "mtp_shift_not_corrected": Mutation(
        "specs/absorbed_mla_parts.py", "        correct_packed_roll()  # Here", "        # Here"
    ),
}
