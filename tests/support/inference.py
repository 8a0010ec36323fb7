"""Run the attention over a static context, or over a paged cache that a test fills."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor, nn

from absorbed_mla.caching import DerivedTables
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths
from tests.support import world
from tests.support.harness import Setup, all_tokens, own_tokens
from tests.support.layouts import dense


@torch.no_grad()
def infer_in_steps(
    attention: nn.Module,
    setup: Setup,
    x: Tensor,
    cuts: Sequence[int],
    context: StaticInferenceContext | None = None,
) -> Tensor:
    """Whole output [tokens, batch, hidden] for whole ``x``, ``cuts`` tokens at a time."""
    tokens, batch, _ = x.shape
    assert sum(cuts) == tokens, "the cuts cover the sequence"
    context = context or StaticInferenceContext(batch, tokens)
    outputs = []
    for size in cuts:
        first = context.sequence_len_offset
        layout, group = dense(size, batch), world.cp_group()
        part = own_tokens(x[first : first + size], layout, setup, group)
        output, _ = attention(part, None, inference_context=context)
        outputs.append(all_tokens(output, layout, setup, group))
        context.sequence_len_offset += size
    return torch.cat(outputs)


class PagedStep:
    """A step over a paged cache with blocks in random order and NaN in all unused places.

    Args:
        lengths: New tokens and keys of each row.
        cached: [latent | k_rope] of the keys of each row that are cached already.
        block_size: Tokens in a block.
        part_keys: Keys in a part of the cache; None: one part has all.
    """

    ranks = None
    shares = None
    whole_prompts = None
    cascade = None

    def __init__(
        self,
        lengths: RowLengths,
        cached: Sequence[Tensor],
        block_size: int = 4,
        part_keys: int | None = None,
    ) -> None:
        self.lengths, self.block_size, self.part_keys = lengths, block_size, part_keys
        self.tables = DerivedTables()
        self.max_position = max(lengths.keys)
        self.windowed = part_keys is not None
        blocks = [-(-keys // block_size) for keys in lengths.keys]
        order = torch.randperm(sum(blocks) + 3, generator=torch.Generator().manual_seed(4)).int()
        table = torch.full((len(blocks), max(blocks)), -1, dtype=torch.int32)
        for row, ids in enumerate(order[: sum(blocks)].split(blocks)):
            table[row, : len(ids)] = ids
        self.cache = cached[0].new_full((len(order), block_size, cached[0].shape[-1]), torch.nan)
        self.rows = Rows.of(lengths.queries, lengths.keys, table)
        for row, kv in enumerate(cached):
            self._put(row, 0, kv)

    def _put(self, row: int, first: int, kv: Tensor) -> None:
        for place, key in enumerate(kv, first):
            block = self.rows.block_table[row, place // self.block_size]
            self.cache[block, place % self.block_size] = key

    def write(self, kv: Tensor) -> None:
        """Append every row's new latents [T, 1, C + rope]."""
        parts = kv.squeeze(1)[: sum(self.lengths.queries)].split(list(self.lengths.queries))
        for row, part in enumerate(parts):
            self._put(row, self.lengths.keys[row] - len(part), part)

    def parts(self, end: int | None = None) -> Iterator[CachePart]:
        """The cache, or its keys ``part_keys`` positions at a time."""
        if self.part_keys is None:
            yield CachePart(self.cache, self.rows)
            return
        assert self.part_keys % self.block_size == 0
        for start in range(0, end or self.max_position, self.part_keys):
            skipped = self.rows.block_table[:, start // self.block_size :]
            rows = replace(self.rows, block_table=skipped)
            yield CachePart(self.cache, rows, start, start + self.part_keys)
