"""What all layers of one forward read of Megatron's ``DynamicInferenceContext``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from absorbed_mla.caching import DerivedTables
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import RowLengths

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
        tables: What layers derive from these.
    """

    rows: Rows
    lengths: RowLengths | None
    positions: Tensor
    places: tuple[Tensor, Tensor]
    tables: DerivedTables = field(default_factory=lambda: DerivedTables(_MOST_TABLES))

    @classmethod
    def of(cls, context: Any) -> ForwardRows:
        """Of the forward that the context is initialized for, made by the first layer that asks.

        A CUDA graph has to compute what it reads, so there every layer makes its own.
        """
        if context.using_cuda_graph_this_step():
            return cls._made(context)
        state = context.active_attn_metadata["mha_metadata"].state_data
        # Megatron makes another dictionary in every step; the decode loop changes its numbers, and
        # counts its steps.
        former, number, found = vars(context).get("latent_forward", (None, None, None))
        if found is None or former is not state or number != context.step_count:
            found = cls._made(context)
            context.latent_forward = state, context.step_count, found
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
        view, tokens = context.gpu_view, slice(context.padded_active_token_count)
        return cls(
            rows,
            None if context.using_cuda_graph_this_step() else _lengths(context),
            view.token_to_position_in_request[tokens].long(),
            (
                view.token_to_block_idx[tokens],
                view.token_to_local_position_within_kv_block[tokens].long(),
            ),
        )


def of_active_requests(context: Any, *names: str) -> list[list[int]]:
    """Of every request of the step, in the order of tokens, what the context has by these names.

    Args:
        context: Megatron's ``DynamicInferenceContext``.
        names: Of tensors with a number for each request, on the CPU.
    """
    active = slice(context.paused_request_count, context.total_request_count)
    return [getattr(context, name)[active].tolist() for name in names]


def _lengths(context: Any) -> RowLengths:
    """Lengths of the active requests, from tensors that Megatron keeps on the CPU."""
    queries: Sequence[int]
    queries, cached = of_active_requests(
        context, "request_query_lengths", "request_kv_length_offsets"
    )
    return RowLengths(tuple(queries), tuple(q + c for q, c in zip(queries, cached)))
