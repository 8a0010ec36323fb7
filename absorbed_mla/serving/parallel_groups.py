"""``ParallelGroups``: Megatron's process groups of one layout, beside those of other layouts."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state


class ParallelGroups:
    """Process groups of one layout of the ranks, which are Megatron's own inside a ``with`` block.

    A model keeps the groups with which it was built, but ``parallel_state``, which training's
    schedules and ``LLM`` ask, knows one layout at a time. Making it is collective; what was
    current stays so until the block.

    Args:
        sizes: As for Megatron's ``parallel_state.initialize_model_parallel``.
    """

    def __init__(self, **sizes: Any) -> None:
        former = _current()
        parallel_state.destroy_model_parallel()
        try:
            parallel_state.initialize_model_parallel(**sizes)
            self._own = _current()
        finally:
            vars(parallel_state).update(former)
        self._former: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._former.append(_current())
        vars(parallel_state).update(self._own)

    def __exit__(self, *_: object) -> None:
        vars(parallel_state).update(self._former.pop())


def _current() -> dict[str, Any]:
    """All that ``initialize_model_parallel`` sets."""
    return {k: v for k, v in vars(parallel_state).items() if k.startswith("_") and k.isupper()}
