"""The LoRA adapters of an engine's requests."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.lora.slots import LoRASlots


class RequestAdapters:
    """The adapters of requests, each in a slot of the model until the requests have ended.

    Args:
        model: That generates.
        context: Of its forward passes.
    """

    def __init__(self, model: GPTModel, context: DynamicInferenceContext) -> None:
        self._model, self._context, self._slots = model, context, LoRASlots.of(model)
        # By number of the request.
        self._of_requests: dict[int, int] = {}

    def clear(self) -> None:
        """Numbers of requests begin anew."""
        self._of_requests = {}

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Every forward pass inside the block adds each token's own adapter."""
        if self._slots is None:
            yield
            return
        hook = self._model.register_forward_pre_hook(self._begin_step)
        try:
            yield
        finally:
            hook.remove()

    def hold(
        self, number: int, request: LoRARequest, cache_salt: str | None, running: Collection[int]
    ) -> str:
        """Give a request its adapter; returns a ``cache_salt`` that no other adapter has.

        Args:
            number: Of the request.
            request: Names the adapter.
            cache_salt: Of the request.
            running: Numbers of the requests that have not ended.

        Raises:
            ValueError: If the model has no room for adapters, or see :meth:`LoRASlots.hold`.
        """
        if self._slots is None:
            raise ValueError("lora_request needs enable_lora=True, got False")
        self._of_requests = {n: slot for n, slot in self._of_requests.items() if n in running}
        slot, digest = self._slots.hold(request, set(self._of_requests.values()))
        self._of_requests[number] = slot
        return f"{digest} {cache_salt!r}"

    def _begin_step(self, model: GPTModel, inputs: tuple) -> None:
        assert self._slots is not None
        self._slots.begin_step(self._context, self._of_requests)
