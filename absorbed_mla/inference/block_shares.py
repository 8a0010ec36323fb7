"""Which numbers of ranks can share the blocks of a cache; torch is not needed to ask."""

from __future__ import annotations


def require_shares(ranks: int, block_size: int) -> None:
    """Check that ranks can share blocks.

    Args:
        ranks: The tensor-parallel size, times the context-parallel one.
        block_size: Tokens of a block.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    if ranks < 2 or block_size % ranks:
        raise ValueError(
            "decode_context_parallel=True needs tensor_parallel_size (times context_parallel_size) "
            f"to be at least 2 and to divide the {block_size} tokens of a block, got {ranks}"
        )
