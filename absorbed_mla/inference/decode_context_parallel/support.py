"""Where decode context parallelism can run; torch is not needed to ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from absorbed_mla.options import AbsorbedMLAOptions


def require_shares(ranks: int, block_size: int) -> None:
    """Check that ranks can share blocks.

    Args:
        ranks: The tensor-parallel size, times the context-parallel one.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    if ranks < 2 or block_size % ranks:
        raise ValueError(
            "decode_context_parallel=True needs tensor_parallel_size (times context_parallel_size) "
            f"to be at least 2 and to divide the {block_size} tokens of a block, got {ranks}"
        )


def require_shareable(options: AbsorbedMLAOptions, window: int | None = None) -> None:
    """Check that a layer's options, and its window, hold where ranks share the cache.

    Raises:
        ValueError: Naming the option that does not.
    """
    if options.batch_invariant:
        raise ValueError(
            "decode_context_parallel=True does not go with parity mode (batch_invariant=True): "
            "ranks sum up their parts of the keys, which training sums up in order"
        )
    if window is not None:
        raise ValueError(
            f"decode_context_parallel=True does not go with window_size=({window - 1}, 0): ranks "
            "see all of the keys that they share"
        )
