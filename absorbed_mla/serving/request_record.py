"""Megatron's request record, which keeps what the request asked for after an eviction."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from megatron.core.inference.inference_request import (
    DynamicInferenceRequestRecord,
    compute_block_hashes_batched,
)
from torch import Tensor


class RequestRecord(DynamicInferenceRequestRecord):
    """Begins a new part at every eviction, as Megatron's does.

    That loses the stop words, all stop tokens but the first, and the hashes by which the part's
    prompt is found in the prefix cache, where its former blocks may still be.

    Attributes:
        priority: Of the request; smaller ones come earlier.
        cache_salt: Requests share blocks with those of the same salt only, None being one, too.
        first_chunk: When the step with the first chunk of its prompt began, in seconds since the
            epoch; None of prompts that were read as a whole.
    """

    priority: int = 0
    cache_salt: str | None = None
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
            part.precomputed_block_hashes = block_hashes(
                part.prompt_tokens, part.block_size_tokens, self.cache_salt
            )


def block_hashes(tokens: Tensor, block_size: int, cache_salt: str | None) -> list[int]:
    """Hashes of a text's whole blocks, each over the salt and all tokens up to the block's end.

    Args:
        tokens: Token ids, int64 [S].
        cache_salt: As if a block of its own came before the text, of numbers that are no token ids.
    """
    if cache_salt is None:
        return compute_block_hashes_batched(tokens, block_size)
    digest = hashlib.sha256(cache_salt.encode(errors="surrogatepass")).digest()
    salt = tokens.new_full((block_size,), -1)
    salt[: len(digest)] = tokens.new_tensor(list(digest))
    return compute_block_hashes_batched(torch.cat((salt, tokens)), block_size)[1:]
