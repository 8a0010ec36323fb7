"""Blocks of generated tokens in Megatron's prefix cache, which itself has those of prompts only."""

from __future__ import annotations

import torch
from megatron.core.inference.config import PrefixCachingEvictionPolicy
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import (
    DynamicInferenceRequest,
    compute_block_hashes_batched,
)
from torch import Tensor

from absorbed_mla.serving.megatron_engine.names import RELEASE_REQUESTS


class GeneratedBlocks:
    """Registers the full blocks of a request when it gives them back: it ends, or is evicted.

    Only tokens count that are final, and whose latents a step has written that is known not to have
    failed: all but the last one of which the request has been told by then. It may have one block
    less than it wrote, where that token or one of the step in flight fills it.

    Args:
        engine: With a prefix cache under the LRU policy, of a model without other states.

    Attributes:
        failed: Requests without a token in their logits, whose latents nobody may find.
    """

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine, self._context = engine, engine.context
        # Those that have ended, but have a row in a step in flight.
        self._ended: dict[int, DynamicInferenceRequest] = {}
        self.failed: set[int] = set()
        release = RELEASE_REQUESTS.of(self._context)

        def register_and_release(rows: Tensor) -> None:
            for row in rows.tolist():
                self._register(row)
            release(rows)

        RELEASE_REQUESTS.replace(self._context, register_and_release)

    def keep(self, request: DynamicInferenceRequest) -> None:
        """Megatron's engine forgets this request before its blocks are released."""
        self._ended[request.request_id] = request

    def forget_ended(self) -> None:
        """No request has a row any more."""
        self._ended.clear()

    def clear(self) -> None:
        """Numbers of requests begin anew."""
        self._ended.clear()
        self.failed.clear()

    def _register(self, row: int) -> None:
        number = int(self._context.request_ids[row])
        request = self._ended.pop(number, None)
        if request is None and number in self._engine.requests:
            request = self._engine.requests[number].record[-1]
        if request is None or number in self.failed or not request.generated_tokens:
            return
        allocator, size = self._context.kv_block_allocator, self._context.block_size_tokens
        tokens = request.prompt_tokens.cpu()
        tokens = torch.cat((tokens, tokens.new_tensor(request.generated_tokens[:-1])))
        if len(tokens) // size == len(request.precomputed_block_hashes):
            return
        hashes = compute_block_hashes_batched(tokens, size)
        blocks = self._context.request_to_kv_block_ids[row, : len(hashes)].tolist()
        # Another request may have computed the same text at the same time.
        known = allocator.kv_hash_to_block_id
        new = [i for i, value in enumerate(hashes) if value not in known]
        parents = [0, *hashes]
        allocator.register_kv_block_hashes(
            [blocks[i] for i in new], [hashes[i] for i in new], [parents[i] for i in new]
        )


def generated_blocks(engine: DynamicInferenceEngine) -> GeneratedBlocks | None:
    """None where blocks are not kept beyond their requests, or the model has other states."""
    context = engine.context
    if not context.enable_prefix_caching or context.is_hybrid_model:
        return None
    policy = context.kv_block_allocator.prefix_caching_eviction_policy
    return GeneratedBlocks(engine) if policy == PrefixCachingEvictionPolicy.LRU else None
