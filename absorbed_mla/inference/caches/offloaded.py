"""The latent cache in an ``OffloadingContext``: blocks on the device, and read from CPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from absorbed_mla.inference.caches.dynamic import DynamicCache, DynamicStep
from absorbed_mla.inference.step import CachePart


class OffloadedStep(DynamicStep):
    """As :class:`DynamicStep`, over several parts where blocks are in host memory."""

    def __init__(self, context: Any, layer_number: int, tokens: int, layer_offset: int = 0) -> None:
        super().__init__(context, layer_number, tokens, layer_offset)
        self.windowed = len(context.tiers.plan.windows) > 1
        self._layer = context.layer_map[layer_number - 1]

    def write(self, kv: Tensor) -> None:
        """See :class:`InferenceStep`."""
        count, view = self.context.padded_active_token_count, self.context.gpu_view
        places = view.token_to_local_position_within_kv_block[:count]
        rows = kv.view(self.context.memory_buffer.dtype).squeeze(1)
        self.context.tiers.write(self._layer, places, rows[:count])

    def slots(self) -> None:
        """See :class:`InferenceStep`; new tokens may be in host memory."""

    def write_index_keys(self, keys: Tensor, indexed: Sequence[int]) -> Tensor:
        """See :class:`InferenceStep`; any token may be chosen, and is read on the device."""
        raise ValueError(
            "host_cache_tokens must be 0 for experimental_attention_variant='dsa': any token may "
            "be chosen, and is read on the device"
        )

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """See :class:`InferenceStep`."""
        for part in self.context.tiers.parts(self._layer, self.rows, end):
            yield replace(part, cache=part.cache.view(self.row_dtype or part.cache.dtype))


class OffloadedCache(DynamicCache):
    """See :class:`~absorbed_mla.inference.step.LatentCache`."""

    name = "offloaded"
    summary = "as dynamic, with host_cache_tokens: further blocks in host memory, streamed"
    steps = OffloadedStep

    def why_not(self, context: Any) -> str | None:
        """See :class:`LatentCache`."""
        return None if hasattr(context, "tiers") else "it needs an OffloadingContext"


ENTRY = OffloadedCache()
