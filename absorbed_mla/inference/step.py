"""The interface between the attention and Megatron's inference contexts.

A :class:`LatentCache` knows one kind of context (``inference/caches``); for every forward of a
layer it opens an :class:`InferenceStep`, which writes and reads the layer's latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.inference.cascade import CascadeTables
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.full_prefill import WholePrompts
from absorbed_mla.inference.prefill_context_parallel import TokenShares
from absorbed_mla.inference.rows import Rows
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import LATENT_CACHES


@dataclass(frozen=True)
class CachePart:
    """The keys of all rows at positions ``start`` to ``end``, on the device.

    Attributes:
        cache: [latent | k_rope] in blocks, [blocks, block_size, C + R], or rows of
            ``Fp8Latents``.
        rows: Their block table begins with the block that holds position ``start``.
        start: First position.
        end: One past the last; None: there are no more.
    """

    cache: Tensor
    rows: Rows
    start: int = 0
    end: int | None = None

    def gather(self, row: int, start: int, end: int, out: Tensor) -> None:
        """Copy a row's keys at positions ``start`` to ``end`` to ``out`` [K, C + R], as cached."""
        blocks = self.rows.block_table[row]
        start, end = start - self.start, end - self.start
        if out.is_cuda:
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.paged.gather import gather

            gather(self.cache, blocks, start, end, out)
            return
        positions = torch.arange(start, end)
        block_size = self.cache.shape[1]
        block = blocks.long()[positions // block_size]
        out.copy_(self.cache[block, positions % block_size])


class BatchPart(CachePart):
    """A part of a cache in which every row is one block: block r holds the keys of row r."""

    def gather(self, row: int, start: int, end: int, out: Tensor) -> None:
        """See :class:`CachePart`."""
        out.copy_(self.cache[row, start - self.start : end - self.start])


@dataclass(frozen=True)
class RowLengths:
    """The lengths in :class:`Rows` as integers on the host.

    Attributes:
        queries: New tokens of each row.
        keys: Keys of each row, the new tokens' included.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class InferenceStep(Protocol):
    """One forward of one layer over its cache.

    Attributes:
        max_position: One more than the largest position that a token may have.
        block_size: Tokens in a block of every part's cache.
        windowed: Whether there may be several parts.
        ranks: Those that share the latents of every request; None: each rank has all of them.
        shares: How ranks divide the new tokens; None: each computes all of them.
        whole_prompts: In a CUDA graph, the step's rows if they are only whole prompts and rows of
            one token; None: they may be any.
        cascade: Groups of rows that begin with the same cached blocks; None: each attends alone.
        tables: What a layer derives from rows and lengths; the same object for all layers of a
            forward where its cache has one for them.
    """

    max_position: int
    block_size: int
    windowed: bool
    ranks: CacheShares | None
    shares: TokenShares | None
    whole_prompts: WholePrompts | None
    cascade: CascadeTables | None
    tables: DerivedTables

    @property
    def rows(self) -> Rows:
        """The requests; tokens of one request are neighbours on the token axis."""

    @property
    def lengths(self) -> RowLengths | None:
        """Lengths of the rows; None for a CUDA graph, which must serve rows of any length."""

    def positions(self) -> Tensor | slice:
        """Position of each new token in its request, int64 [T], or all of them as a slice."""

    def pack(self, x: Tensor) -> Tensor:
        """Tokens of ``x`` [S, B, width], in Megatron's layout, on one axis: [T, 1, width].

        Those of all ranks that divide the new tokens; collective then.
        """

    def pack_queries(self, x: Tensor) -> Tensor:
        """Likewise, of the tokens that this rank computes."""

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack_queries`."""

    def write(self, kv: Tensor) -> None:
        """Append the latents of the new tokens, [latent | k_rope] [T, 1, C + R].

        Or rows of ``Fp8Latents``, as those that the step was opened with.
        """

    def slots(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where :meth:`write` puts rows, for a kernel that makes them; None: it must be called.

        Returns:
            The cache [blocks, block_size, C + R], and of each new token its block and its position
            in that, int32 or int64 [T].
        """

    def write_index_keys(self, keys: Tensor, indexed: Sequence[int]) -> Tensor:
        """Append the index keys of the new tokens, of a layer with sparse attention.

        Args:
            keys: [T, 1, Di].
            indexed: Numbers of the layers in the model, from 1, that have an indexer, in order.

        Returns:
            The layer's index keys, where the block table of :attr:`rows` has them: [blocks,
            block_size, Di], with any strides of blocks and positions.

        Raises:
            ValueError: If the context cannot hold them.
        """

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """The keys in order of position, the new tokens' included, at least those below ``end``.

        The memory of a part is reused for the next one.
        """


class LatentCache(Protocol):
    """Keeps latents in one kind of inference context: an entry of the registry ``LATENT_CACHES``.

    Attributes:
        name: Name of its file.
        summary: Which contexts, and what is kept where, one phrase.
    """

    name: str
    summary: str

    def why_not(self, context: Any) -> str | None:
        """Why it cannot keep latents in contexts of this class, or None.

        The answer is remembered for the class; ``open`` checks the state of a context.
        """

    def open(
        self,
        context: Any,
        layer_number: int,
        layer_offset: Callable[[], int],
        kv: Tensor,
        options: AbsorbedMLAOptions,
        owner: object,
    ) -> InferenceStep:
        """The cache of one layer for one forward.

        Args:
            layer_number: Of the layer in the model, from 1.
            layer_offset: Returns the number of layers before this pipeline stage.
            kv: As wide as the rows that will be written, of their dtype and in Megatron's layout,
                [S, B, C + R or width]; the values may be any.
            options: Where latents are kept.
            owner: An object that lives as long as the layer and belongs to no other layer.

        Raises:
            ValueError: If the new tokens do not fit into the context, or it cannot hold latents, or
                holds those of another model.
        """


def choose_cache(context: Any) -> LatentCache:
    """The entry of ``LATENT_CACHES`` for an inference context.

    Raises:
        ValueError: If there is none.
    """
    accepting, refused = LATENT_CACHES.examine("auto", context)
    if not accepting:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        kind = type(context).__name__
        raise ValueError(f"inference_context must be able to keep latents, got {kind}: {reasons}")
    return accepting[0]
