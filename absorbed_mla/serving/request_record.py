"""Megatron's request record, which keeps what the request asked for after an eviction."""

from __future__ import annotations

from typing import Any

from megatron.core.inference.inference_request import (
    DynamicInferenceRequestRecord,
    compute_block_hashes_batched,
)


class RequestRecord(DynamicInferenceRequestRecord):
    """Begins a new part at every eviction, as Megatron's does.

    That loses the stop words, all stop tokens but the first, and the hashes by which the part's
    prompt is found in the prefix cache, where its former blocks may still be.

    Attributes:
        first_chunk: When the step with the first chunk of its prompt began, in seconds since the
            epoch; None of prompts that were read as a whole.
    """

    first_chunk: float | None = None

    def checkpoint(self, *args: Any, **options: Any) -> None:
        """Begin a part whose prompt ends with the tokens generated so far."""
        former = self[-1]
        super().checkpoint(*args, **options)
        part = self[-1]
        part.stop_word_ids = former.stop_word_ids
        part.block_size_tokens = former.block_size_tokens
        part.enable_prefix_caching = former.enable_prefix_caching
        # Blocks found in the prefix cache have no logits, which log-probs of a prompt need.
        if part.enable_prefix_caching and part.sampling_params.skip_prompt_log_probs:
            part.precomputed_block_hashes = compute_block_hashes_batched(
                part.prompt_tokens, part.block_size_tokens
            )
