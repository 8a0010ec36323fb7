"""The latent cache in Megatron's ``DynamicInferenceContext``: blocks, requests of any length.

The only module that knows that context; its scheduler, allocator and prefix cache are untouched.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.caching import DerivedTables, this_run
from absorbed_mla.inference.cascade import CascadeTables
from absorbed_mla.inference.decode_context_parallel.attention import SharedCachePart
from absorbed_mla.inference.decode_context_parallel.layout import CacheShares
from absorbed_mla.inference.decode_context_parallel.support import require_shareable
from absorbed_mla.inference.full_prefill import WholePrompts
from absorbed_mla.inference.index_keys import index_keys
from absorbed_mla.inference.prefill_context_parallel import TokenShares
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths
from absorbed_mla.options import AbsorbedMLAOptions

# Of one forward; its layers ask for a few, and some for each segment of rows.
_MOST_TABLES = 256


@dataclass(frozen=True)
class ForwardRows:
    """The requests of a forward, and where its new tokens go.

    Attributes:
        rows: The requests.
        lengths: Of the rows, on the host; None for a CUDA graph.
        positions: Of every new token in its request, int64 [T].
        places: Block of the cache, and position in it, of every new token; int64 [T] each.
        whole_prompts: See :class:`InferenceStep`.
        cascade: Likewise.
        tables: What layers derive from these.
    """

    rows: Rows
    lengths: RowLengths | None
    positions: Tensor
    places: tuple[Tensor, Tensor]
    whole_prompts: WholePrompts | None = None
    cascade: CascadeTables | None = None
    tables: DerivedTables = field(default_factory=lambda: DerivedTables(_MOST_TABLES))

    @classmethod
    def of(cls, context: Any) -> ForwardRows:
        """Of the forward that the context is initialized for, made by the first layer that asks.

        A CUDA graph has to compute what it reads, so in graphs of layers each makes its own.
        """
        run = this_run()
        if run is None and context.using_cuda_graph_this_step():
            return cls._made(context)
        # Megatron makes another dictionary in every step; our scheduler changes its numbers, and
        # counts its steps.
        state = context.active_attn_metadata["mha_metadata"].state_data
        former, number, of, found = vars(context).get("latent_forward", (None,) * 4)
        if found is None or former is not state or number != context.step_count or of is not run:
            found = cls._made(context)
            context.latent_forward = state, context.step_count, run, found
        return found

    @classmethod
    def _made(cls, context: Any) -> ForwardRows:
        table = context.active_attn_metadata["mha_metadata"].state_data
        cu_query_lengths, max_query_length = context.cu_query_lengths()
        _, kv_lengths, max_kv_length = context.cu_kv_lengths()
        rows = Rows(
            cu_query_lengths[:-1],
            table["query_lengths"],
            kv_lengths,
            table["block_table"],
            max_query_length=int(max_query_length),
            max_kv_length=int(max_kv_length),
        )
        lengths = None
        if not context.using_cuda_graph_this_step():
            # From tensors that Megatron keeps on the CPU.
            names = "request_query_lengths", "request_kv_length_offsets"
            queries, cached = of_active_requests(context, *names)
            lengths = RowLengths(tuple(queries), tuple(q + c for q, c in zip(queries, cached)))
        count = context.padded_active_token_count
        view, tokens = context.gpu_view, slice(count)
        # Whether a graph is being captured of steps with such rows; see ``prefill_graphs.py``.
        whole_prompts = getattr(context, "reads_whole_prompts", False)
        return cls(
            rows,
            lengths,
            view.token_to_position_in_request[tokens].long(),
            (
                view.token_to_block_idx[tokens],
                view.token_to_local_position_within_kv_block[tokens].long(),
            ),
            WholePrompts.of(rows, count) if whole_prompts else None,
            getattr(context, "cascade", None),
        )


class DynamicStep:
    """One forward of the requests that the context scheduled.

    Args:
        context: Megatron's, made from a config with ``cache_mla_latents``.
        layer_number: Of the layer among those of its pipeline stage, from 1.
        tokens: Tokens of the forward on this rank, Megatron's padding included.
        layer_offset: Number of layers before this pipeline stage.

    Raises:
        ValueError: If the context does not hold latents, or scheduled another number of tokens.
    """

    windowed = False
    # Of cached rows; None: that of the context's memory.
    row_dtype: torch.dtype | None = None

    def __init__(self, context: Any, layer_number: int, tokens: int, layer_offset: int = 0) -> None:
        if not getattr(context, "cache_mla_latent", False):
            raise ValueError(
                "DynamicInferenceContext must hold latents: set cache_mla_latents=True in the "
                "config that the context is made from"
            )
        self.shares: TokenShares | None = getattr(context, "token_shares", None)
        if tokens * (self.shares.size if self.shares else 1) != context.padded_active_token_count:
            raise ValueError(
                f"hidden_states have {tokens} tokens, but the inference context scheduled "
                f"{context.padded_active_token_count}; call its initialize_attention_state first, "
                "and make it with InferenceConfig.max_tokens a multiple of 64"
            )
        self.context, self.layer_number = context, layer_number
        self.layer_offset = layer_offset
        self.ranks = _ranks(context)
        self.block_size = int(context.block_size_tokens) // (self.ranks.size if self.ranks else 1)
        # Drafts after the last token of a full context are computed, and then discarded.
        drafts = getattr(context, "num_speculative_tokens", 0)
        self.max_position = int(context.max_sequence_length) + drafts
        self._forward = ForwardRows.of(context)
        self.rows, self.lengths = self._forward.rows, self._forward.lengths
        self.whole_prompts, self.cascade = self._forward.whole_prompts, self._forward.cascade
        self.tables = self._forward.tables

    def require_rows(self, rows: Tensor) -> None:
        """Keep rows like these, which may be views of the context's numbers.

        Raises:
            ValueError: If the context was made for rows of another width.
        """
        memory = self.context.memory_buffer
        held, wanted = (x.shape[-1] * x.element_size() for x in (memory, rows))
        if held != wanted:
            raise ValueError(
                f"DynamicInferenceContext must hold {wanted} bytes of a token, got {held}: make it "
                "from absorbed_mla.inference.context_config.context_config(config, options) with "
                "the layers' latent_cache_dtype (layers of different widths, of a "
                "per_layer_config, need a StaticInferenceContext)"
            )
        self.row_dtype = rows.dtype

    def positions(self) -> Tensor:
        """See :class:`InferenceStep`."""
        return self._forward.positions

    def pack(self, x: Tensor) -> Tensor:
        """The context packs tokens itself; ranks may have some of them each."""
        return x if self.shares is None else self.shares.gather(x)

    def pack_queries(self, x: Tensor) -> Tensor:
        """Nothing to do."""
        return x

    def unpack(self, x: Tensor) -> Tensor:
        """Nothing to do."""
        return x

    def write(self, kv: Tensor) -> None:
        """See :class:`InferenceStep`."""
        cache, *place = self.slots()
        cache[tuple(place)] = kv.squeeze(1)[: len(self._forward.positions)]

    def slots(self) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`InferenceStep`."""
        place = self._forward.places
        if self.ranks is not None:
            place = self.ranks.places(*place, self.context.kv_block_allocator.dummy_block_idx)
        return self._cache(), *place

    def write_index_keys(self, keys: Tensor, indexed: Sequence[int]) -> Tensor:
        """See :class:`InferenceStep`."""
        context = self.context
        if self.ranks is not None:
            raise ValueError(
                "decode_context_parallel=True does not go with sparse attention "
                "(experimental_attention_variant='dsa'): index keys are whole on every rank"
            )
        if context.is_hybrid_model:
            raise ValueError(
                "a DynamicInferenceContext of a hybrid model does not keep index keys; with "
                "experimental_attention_variant='dsa' generate with a GPTModel"
            )
        first = bisect.bisect_right(indexed, self.layer_offset)
        end = bisect.bisect_right(indexed, self.layer_offset + context.num_attention_layers)
        own = bisect.bisect_left(indexed, self.layer_offset + self.layer_number)
        cache = index_keys(context, own - first, end - first, keys)
        # Where the latents of the same tokens are.
        cache[self._forward.places] = keys.squeeze(1)[: len(self._forward.positions)]
        return cache

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """See :class:`InferenceStep`."""
        if self.ranks is None:
            yield CachePart(self._cache(), self.rows)
        else:
            yield SharedCachePart(self._cache(), self.rows, ranks=self.ranks)

    def _cache(self) -> Tensor:
        """The layer's rows on this rank, [blocks, block_size, C + R] or bytes of FP8 rows."""
        cache = self.context.key_value_cache(self.layer_number)[0]
        return cache.view(self.row_dtype or cache.dtype)


def _ranks(context: Any) -> CacheShares | None:
    """Those that share the latents, in an ``decode_context_parallel_context``."""
    return getattr(context, "cache_ranks", None)


def _require_packed(kv: Tensor, options: AbsorbedMLAOptions) -> None:
    """Check what the layer brings to a dynamic context.

    Raises:
        ValueError: If tokens are no packed ones, or the options are for another context.
    """
    if options.latent_cache_tokens is not None:
        raise ValueError(
            "latent_cache_tokens needs a StaticInferenceContext; with DynamicInferenceContext "
            "EngineOptions(host_cache_tokens=...) makes a cache larger than the device's memory"
        )
    if kv.shape[1] != 1:
        raise ValueError(
            f"DynamicInferenceContext packs tokens: batch must be 1, got {kv.shape[1]}"
        )


def of_active_requests(context: Any, *names: str) -> list[list[int]]:
    """Of every request of the step, in the order of tokens, what the context has by these names.

    Args:
        names: Of tensors with a number for each request, on the CPU.
    """
    active = slice(context.paused_request_count, context.total_request_count)
    return [getattr(context, name)[active].tolist() for name in names]


class DynamicCache:
    """See :class:`~absorbed_mla.inference.step.LatentCache`; the context allocates the blocks."""

    name = "dynamic"
    summary = "DynamicInferenceContext: blocks of tokens, requests of any length, CUDA graphs"
    steps = DynamicStep

    def why_not(self, context: Any) -> str | None:
        """See :class:`LatentCache`."""
        if not hasattr(context, "is_static_batching") or context.is_static_batching():
            return "it needs a DynamicInferenceContext"
        if hasattr(context, "tiers"):
            return "some of its blocks are in host memory"
        return None

    def open(
        self,
        context: Any,
        layer_number: int,
        layer_offset: Callable[[], int],
        kv: Tensor,
        options: AbsorbedMLAOptions,
        owner: object,
    ) -> DynamicStep:
        """See :class:`LatentCache`."""
        _require_packed(kv, options)
        if _ranks(context) is not None:
            require_shareable(options)
        tokens, offset = len(kv), layer_offset()
        step = self.steps(context, layer_number - offset, tokens, offset)
        step.require_rows(kv)
        return step


ENTRY = DynamicCache()
