"""Which numbers of ranks can share the blocks of a cache; torch is not needed to ask."""

from __future__ import annotations


def require_shares(ranks: int, block_size: int) -> None:
    """Check that tensor-parallel ranks can share blocks.

    Args:
        ranks: The tensor-parallel size.
        block_size: Tokens of a block.

    Raises:
        ValueError: Naming the option, what it got and what it accepts.
    """
    if ranks < 2 or block_size % ranks:
        raise ValueError(
            "decode_context_parallel=True needs a tensor_parallel_size of at least 2 that divides "
            f"the {block_size} tokens of a block of the cache, got {ranks}"
        )
