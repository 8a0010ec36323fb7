"""The LoRA adapters of an engine's requests."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel

from absorbed_mla.caching import this_run
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.lora.slots import LoRASlots
from absorbed_mla.serving.sampling.parameters import SamplingParams


@dataclass(frozen=True, order=True)
class AdapterRequest:
    """A request that has an adapter, before it is queued; ordered as requests begin.

    Attributes:
        priority: Smaller ones come first.
        number: Of the request.
        prompt: Token ids.
        sampling: How its tokens are drawn.
        cache_salt: Requests with the same one share blocks of the prefix cache.
        lora: Names the adapter.
    """

    priority: int
    number: int
    prompt: Sequence[int] = field(compare=False)
    sampling: SamplingParams = field(compare=False)
    cache_salt: str | None = field(compare=False)
    lora: LoRARequest = field(compare=False)


class RequestAdapters:
    """The adapters of requests, each in a slot of the model until the requests have ended.

    A request waits until there is a slot for its adapter, and those that come after it, with any
    adapter, wait behind it: else requests with the adapters in the slots could go on for ever.

    Args:
        model: That generates.
        context: Of its forward passes.

    Attributes:
        waiting: Requests that wait for a slot, in their order.
    """

    def __init__(self, model: GPTModel, context: DynamicInferenceContext) -> None:
        self._model, self._context, self._slots = model, context, LoRASlots.of(model)
        # By number of the request.
        self._of_requests: dict[int, int] = {}
        self.waiting: list[AdapterRequest] = []
        # Whether the first of them has found no slot; none is free until a request ends.
        self._first_waits = False

    @property
    def enabled(self) -> bool:
        """Whether the model has room for adapters."""
        return self._slots is not None

    def clear(self) -> None:
        """Numbers of requests begin anew."""
        self._of_requests, self.waiting, self._first_waits = {}, [], False

    def add(self, request: AdapterRequest) -> None:
        """Let a request wait for a slot; see :meth:`ready`."""
        assert self._slots is not None
        bisect.insort(self.waiting, request)
        self._first_waits &= self.waiting[0] is not request

    def discard(self, number: int) -> bool:
        """Forget a request that waits for a slot; False if it does not."""
        left = [request for request in self.waiting if request.number != number]
        found, self.waiting = len(left) < len(self.waiting), left
        self._first_waits &= not found
        return found

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Every forward pass inside the block adds each token's own adapter."""
        if self._slots is None:
            yield
            return
        hook = self._model.register_forward_pre_hook(lambda *_: self.begin_step())
        try:
            yield
        finally:
            hook.remove()

    def begin_step(self) -> None:
        """Tell the model the adapters of a step's tokens; before a full graph, not inside of it."""
        if self._slots is not None and this_run() is None:
            self._slots.begin_step(self._context, self._of_requests)

    def ready(self, running: Collection[int]) -> Iterator[tuple[AdapterRequest, str, str]]:
        """Give requests their slots; collective over all ranks of the model.

        Args:
            running: Numbers of the requests that were queued and have not ended.

        Returns:
            Each request that waits no longer, a ``cache_salt`` that no other adapter has, and why
            the adapter cannot be had, or ``""``.
        """
        while self.waiting:
            assert self._slots is not None
            self._of_requests = {n: slot for n, slot in self._of_requests.items() if n in running}
            in_use, first = set(self._of_requests.values()), self.waiting[0]
            if self._first_waits and len(in_use) == self._slots.max_loras:
                return
            salt = error = ""
            try:
                held = self._slots.hold(first.lora, in_use)
            except ValueError as failure:
                error = str(failure)
            else:
                if held is None:
                    self._first_waits = True
                    return
                self._of_requests[first.number], digest = held
                salt = f"{digest} {first.cache_salt!r}"
            self.waiting, self._first_waits = self.waiting[1:], False
            yield first, salt, error
