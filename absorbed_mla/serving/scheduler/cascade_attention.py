"""Cascade attention of decode steps: which requests share a prefix, and when that is worth it.

See ``inference/cascade.py``. Groups come from the block tables alone, whoever made them: requests
share a block of the prefix cache by having its number.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.inference.cascade import CascadeTables
from absorbed_mla.log_once import log_once
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.scheduler.block_pool import attentions, indexers
from absorbed_mla.serving.scheduler.prefill_graphs import may_take_flash_mla

logger = logging.getLogger(__name__)

# Rows of a tile of the kernels, heads times tokens.
_TILE_ROWS = 64
# Keys that a step must save to be worth it, in each layer: an H100 takes about 30 us for them at
# 600 TFLOP/s, and about half for the calls and copies beside (computed, not measured). And the part
# of all keys that it reads: outputs of all tokens are copied and merged.
_LEAST_SAVED, _LEAST_PART = 2**17, 1 / 8
# A prefix that some rows share is looked for behind that of more rows so often.
_MOST_LEVELS = 8


class PrefixGroup(NamedTuple):
    """Requests, ``rows`` of the block table, whose first ``blocks`` blocks are the same."""

    rows: Any
    blocks: int


def keys_saved(members: int, queries: int, keys: int, heads: int) -> int:
    """Keys that a layer reads less if requests attend to a prefix together.

    A tile of the kernels has as many tokens of one request, or one group, as fit with all heads
    into its rows, and reads all of their keys; what few tokens leave free costs as much. With more
    than 32 heads every token fills a tile of its own: nothing is saved.

    Args:
        members: Requests of the group.
        queries: New tokens of each.
        keys: Of the prefix.
        heads: Of this rank.
    """
    tokens = max(1, _TILE_ROWS >> (heads - 1).bit_length())
    return keys * (members * -(-queries // tokens) - -(-members * queries // tokens))


def find_groups(table: Any, cached: Any, saved: Callable[[int, int], int]) -> list[PrefixGroup]:
    """The groups, no row in two, that save most; each over the longest prefix of its rows.

    Args:
        table: Blocks of every row, int32 [rows, blocks].
        cached: How many of them hold nothing but cached tokens, [rows].
        saved: What a group of so many rows saves over so many blocks.
    """

    def best(rows: Any, levels: int) -> list[PrefixGroup]:
        least = int(cached[rows].min()) if len(rows) > 1 else 0
        same = (table[rows, :least] == table[rows[:1], :least]).all(0)
        blocks = least if same.all() else int(same.argmin())
        longer, inner = rows[cached[rows] > blocks], []
        if levels and len(longer) > 1:
            following = table[longer, blocks]
            for block, count in zip(*np.unique(following, return_counts=True)):
                inner += best(longer[following == block], levels - 1) if count > 1 else []
        deeper = sum(saved(len(one.rows), one.blocks) for one in inner)
        return [PrefixGroup(rows, blocks)] if saved(len(rows), blocks) > deeper else inner

    return best(np.arange(len(table)), _MOST_LEVELS)


def tables_of(
    groups: Sequence[PrefixGroup], rows: int, queries: int, tokens: int, block_size: int
) -> Tensor:
    """The numbers of ``CascadeTables``, int32 [8, tokens], on the host.

    ``queries`` are the new tokens of each of ``rows``, ``tokens`` those of the step with padding.
    """
    found = CascadeTables(*np.zeros((8, tokens), dtype=np.int32))
    first = np.arange(rows)
    for group in groups:
        first[group.rows] = group.rows[0]
    order = np.argsort(first, kind="stable")
    found.starts[order] = np.arange(rows) * queries
    found.order[:] = np.arange(tokens)
    found.order[: rows * queries] = (order[:, None] * queries + np.arange(queries)).ravel()
    found.places[found.order] = np.arange(tokens)
    for number, group in enumerate(groups):
        found.skipped[group.rows] = group.blocks
        found.group_starts[number] = found.starts[group.rows[0]]
        found.group_lengths[number] = len(group.rows) * queries
        found.group_keys[number] = group.blocks * block_size
        found.group_rows[number] = group.rows[0]
    return torch.from_numpy(np.stack(found))


class CascadeAttention:
    """Tells the cache before a decode step which rows share a prefix, if that saves time.

    The tables have one place in memory, where CUDA graphs of whole steps read them. Graphs of
    layers, which Megatron captures, hold steps without them.

    Args:
        context: Of Megatron's engine; its attribute ``cascade`` is what the cache reads.
        heads: Of this rank; None: all groups are taken.

    Attributes:
        steps: That had groups.
    """

    def __init__(self, context: DynamicInferenceContext, heads: int | None) -> None:
        self._context, self._heads, self.steps = context, heads, 0
        self._in_graph = False
        # Of the last step that was looked at: requests by row, and their groups.
        self._requests, self._groups = b"", list[PrefixGroup]()
        self._memory: Tensor | None = None
        self._written: tuple[Any, tuple[int, int], Any] = None, (0, 0), None

    @contextlib.contextmanager
    def in_graph(self) -> Iterator[tuple[object, ...]]:
        """Around a step in one CUDA graph: yields what a cascade adds to the graph's key."""
        self._in_graph = True
        try:
            self._begin_step()
            found = self._context.cascade
            yield () if found is None else ("cascade", found.order is None)
        finally:
            self._in_graph = False

    def forget(self) -> None:
        """Look for groups anew: other requests may have the numbers of former ones."""
        self._requests = b""

    def before_forward(self, *_: object) -> None:
        """A hook of the model: look for the groups of a step without a graph."""
        if not self._in_graph:
            self._begin_step()

    def _begin_step(self) -> None:
        context = self._context
        context.cascade = None
        count = context.total_request_count - context.paused_request_count
        alone = context.using_cuda_graph_this_step() and not self._in_graph
        if count < 2 or alone or context.batch_dimensions.prefill_req_count:
            return
        groups = self._groups_of_step()
        if groups:
            context.cascade = self._on_device(groups, count)
            self.steps += 1

    def _groups_of_step(self) -> list[PrefixGroup]:
        """Those of the step before, if it had the same rows, and they hold."""
        context = self._context
        rows = slice(context.paused_request_count, context.total_request_count)
        requests = context.request_ids[rows].numpy().tobytes()
        if (known := requests == self._requests) and not self._groups:
            return self._groups
        table = context.request_to_kv_block_ids[rows].numpy()
        lengths = context.request_kv_length_offsets[rows].numpy()
        cached = lengths // context.block_size_tokens
        # A request that was computed again may have other blocks.
        if not (known and all(_holds(one, table, cached) for one in self._groups)):
            queries = int(context.request_query_lengths[rows.start])
            self._requests, self._groups = requests, self._find(table, cached, lengths, queries)
        return self._groups

    def _find(self, table: Any, cached: Any, lengths: Any, queries: int) -> list[PrefixGroup]:
        size, heads = self._context.block_size_tokens, self._heads or 1

        def saved(members: int, blocks: int) -> int:
            return keys_saved(members, queries, blocks * size, heads)

        groups = find_groups(table, cached, saved)
        if self._heads is None:
            return groups
        least = max(_LEAST_SAVED, _LEAST_PART * int(lengths.sum()))
        return groups if sum(saved(len(rows), blocks) for rows, blocks in groups) >= least else []

    def _on_device(self, groups: list[PrefixGroup], count: int) -> CascadeTables:
        """The tables, written if they are others than those of the step before."""
        context = self._context
        tokens = context.padded_active_token_count
        of, sizes, tables = self._written
        if of is groups and sizes == (count, tokens):
            return tables
        if self._memory is None:
            device = context.gpu_view.token_to_block_idx.device
            with torch.inference_mode(False):  # Megatron's steps write it, too
                self._memory = torch.zeros(8 * context.max_tokens, dtype=torch.int32, device=device)
        numbers = self._memory[: 8 * tokens].view(8, tokens)
        queries = int(context.request_query_lengths[context.paused_request_count])
        made = tables_of(groups, count, queries, tokens, context.block_size_tokens)
        numbers.copy_(made.pin_memory() if numbers.is_cuda else made, non_blocking=True)
        tables = CascadeTables(*numbers)
        if torch.equal(made[0], torch.arange(tokens, dtype=torch.int32)):
            tables = tables._replace(order=None, places=None)
        self._written = groups, (count, tokens), tables
        return tables


def _holds(group: PrefixGroup, table: Any, cached: Any) -> bool:
    rows, blocks = group
    same = table[rows, :blocks] == table[rows[:1], :blocks]
    return bool(same.all() and (cached[rows] >= blocks).all())


def cascade_attention(
    context: DynamicInferenceContext, model: GPTModel, options: EngineOptions, *, lockstep: bool
) -> CascadeAttention | None:
    """Of an engine whose options ask for it; None, with the reason logged, if it cannot run.

    Args:
        lockstep: Whether ranks with requests of their own replay graphs together.

    Raises:
        ValueError: If it cannot run, but ``cascade_attention="on"`` asks for it.
    """
    asked = options.cascade_attention
    why = "it is off" if asked == "off" else why_not(model, options, lockstep=lockstep)
    if why and asked == "on":
        raise ValueError(f"cascade_attention='on' cannot run: {why}; 'auto' and 'off' can")
    if why:
        log_once(logger, "each request attends to its own prefix", why)
        return None
    heads = attentions(model)[0].cached_attention.dims.num_heads_per_rank
    return CascadeAttention(context, None if asked == "on" else heads)


def why_not(model: GPTModel, options: EngineOptions, *, lockstep: bool) -> str:
    """Why requests of an engine cannot attend to a prefix together, or ``""``."""
    ours = [one.cached_attention for one in attentions(model)]
    conditions = {
        "requests share no blocks with prefix_caching=False": not options.prefix_caching,
        "ranks share the latents of each request": options.decode_context_parallel,
        "its cache is partly in host memory": options.host_cache_tokens > 0,
        "attention is Megatron's": not ours or len(ours) < len(model.decoder.layers),
        "attention is sparse": bool(indexers(model)),
        "parity mode adds in the order of training": any(x.options.batch_invariant for x in ours),
        "form='expanded' attends to each request": any(x.options.form == "expanded" for x in ours),
        "attention has windows": any(x.window is not None for x in ours),
        "FlashMLA masks causally": may_take_flash_mla(model),
        "data-parallel ranks replay CUDA graphs together": lockstep,
    }
    return next((reason for reason, holds in conditions.items() if holds), "")
