"""Prefill context parallelism: which new tokens each context-parallel rank computes.

The ranks make the same steps. Where one reads a prompt, every rank takes some of the new tokens
through the layers: it exchanges their latents, keeps its interleaved share of all of them
(``layout.py``), and attends to all keys with its own tokens' queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.utils import WrappedTensor
from torch import Tensor, nn

# New tokens of a step from which on they are divided: with fewer, reading the weights takes the
# time of linear layers.
LEAST_TOKENS = 512


class TokenShares:
    """New tokens that this rank computes: the rank-th part of each of equal pieces of all.

    Args:
        group: The context-parallel ranks.
        pieces: Number of pieces: under sequence parallelism those of the tensor-parallel ranks,
            else 1.
        tokens: New tokens of the step, a multiple of ranks times pieces.

    Attributes:
        size: Number of ranks.
        rank: This one's number.
        own: This rank's tokens among all, in the order in which it has them.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int, tokens: int) -> None:
        self._group, self._pieces = group, pieces
        self.size, self.rank = group.size(), group.rank()
        length = tokens // (self.size * pieces)
        starts = range(self.rank * length, tokens, self.size * length)
        self.own = tuple(slice(start, start + length) for start in starts)

    def gather(self, x: Tensor) -> Tensor:
        """The tokens of all ranks [T, ...], from this one's [T / ranks, ...]."""
        parts = gather(x, self._group).unflatten(0, (self.size, self._pieces, -1))
        return parts.transpose(0, 1).flatten(0, 2)

    def within(self, tokens: slice) -> list[tuple[slice, slice]]:
        """Runs of this rank's tokens among ``tokens``: (slice of ``tokens``, slice of its own)."""
        found, before = [], 0
        for own in self.own:
            first, end = max(own.start, tokens.start), min(own.stop, tokens.stop)
            if first < end:
                there = slice(first - tokens.start, end - tokens.start)
                here = before + first - own.start
                found.append((there, slice(here, here + end - first)))
            before += own.stop - own.start
        return found


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` of all ranks, one after the other along the first dimension."""
    found = x.new_empty(group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(found, x.contiguous(), group=group)
    return found


@contextlib.contextmanager
def dividing_prefill(decoder: nn.Module, group: dist.ProcessGroup, pieces: int) -> Iterator[None]:
    """Have context-parallel ranks divide the new tokens of steps that read prompts.

    What enters and leaves the decoder is whole on every rank.

    Args:
        decoder: Megatron's ``TransformerBlock``.
        group: The context-parallel ranks.
        pieces: As of :class:`TokenShares`.
    """

    def divide(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        context = kwargs.get("inference_context")
        if getattr(context, "cache_ranks", None) is None:
            return None
        context.token_shares = shares = _shares(context, group, pieces)
        if shares is None:
            return None
        hidden = kwargs["hidden_states"]
        if isinstance(hidden, WrappedTensor):
            hidden = hidden.unwrap()
        own = hidden.chunk(shares.size)[shares.rank].contiguous()
        return args, {**kwargs, "hidden_states": own}

    def join(module: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> Tensor | None:
        context = kwargs.get("inference_context")
        if getattr(context, "token_shares", None) is None:
            return None
        context.token_shares = None
        return gather(output, group)

    hooks = [
        decoder.register_forward_pre_hook(divide, with_kwargs=True),
        decoder.register_forward_hook(join, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shares(context: Any, group: dist.ProcessGroup, pieces: int) -> TokenShares | None:
    """How this step's tokens are divided; None if each rank computes all of them."""
    tokens = context.padded_active_token_count
    if context.using_cuda_graph_this_step() or context.is_decode_only():
        return None
    if tokens < LEAST_TOKENS or tokens % (group.size() * pieces):
        return None
    return TokenShares(group, pieces, tokens)
