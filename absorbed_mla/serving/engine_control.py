"""``EngineControl``: pause, sleep and new weights for a model that others use meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from absorbed_mla.serving.server.service import Service

# Seconds between two looks whether requests have ended.
_POLL = 0.01
_MODES, _TAGS = ("abort", "wait", "keep"), ("weights", "kv_cache")


class EngineControl:
    """What trainers ask of a model that serves, by vLLM's names; each call between two steps.

    Args:
        service: Runs the model.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Let new requests wait until :meth:`resume_generation`; returns when nothing runs.

        Args:
            mode: What becomes of requests that run: ``"abort"`` ends them with what they have,
                ``"wait"`` lets them end, ``"keep"`` lets them wait and go on afterwards.
            clear_cache: Whether the prefix cache is emptied; not with ``"keep"``.

        Raises:
            ValueError: If there is no such mode.
        """
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        service = self._service
        await service.call(lambda _: service.pause(mode))
        while await service.call(lambda _: service.can_step()):
            await asyncio.sleep(_POLL)
        if clear_cache and mode != "keep":
            await service.call(lambda llm: llm.is_ready and llm.reset_prefix_cache())

    async def resume_generation(self) -> None:
        """Run the requests that wait."""
        await self._service.call(lambda _: self._service.resume())

    async def is_paused(self) -> bool:
        """Whether new requests wait."""
        return self._service.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As :meth:`LLM.sleep`; requests are refused until :meth:`wake_up`.

        Args:
            level: As there.
            mode: ``"abort"`` or ``"wait"``, as for :meth:`pause_generation`.

        Raises:
            ValueError: If there is no such level or mode.
        """
        if mode == "keep":
            raise ValueError("mode must be one of abort, wait, got 'keep': sleep empties the cache")
        service = self._service
        await service.call(lambda llm: llm.require_sleep_level(level))
        was_paused = service.is_paused
        try:
            await self.pause_generation(mode, clear_cache=False)
            await service.call(lambda _: service.sleep(level))
        finally:
            if not was_paused:
                await self.resume_generation()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """As :meth:`LLM.wake`; requests are taken again.

        Args:
            tags: ``["weights"]`` alone does nothing: ``update_weights`` takes their memory by
                itself. ``["kv_cache"]``, both and None are the same.

        Raises:
            ValueError: If there is no such tag.
            RuntimeError: If :meth:`sleep` has discarded the weights and none have come.
        """
        if tags is not None and not {*tags} <= {*_TAGS}:
            raise ValueError(f"tags must be some of {', '.join(_TAGS)}, got {tags!r}")
        if not tags or "kv_cache" in tags:
            await self._service.call(lambda llm: llm.wake())

    async def is_sleeping(self) -> bool:
        """Whether the model is asleep."""
        return self._service.llm.is_sleeping

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As :meth:`LLM.reset_prefix_cache`."""
        return await self._service.call(lambda llm: llm.reset_prefix_cache(reset_running_requests))

    async def update_weights(self, weights: Any, **options: Any) -> None:
        """As :meth:`LLM.update_weights`; what runs waits meanwhile, and goes on."""
        await self._service.call(lambda llm: llm.update_weights(weights, **options))
