"""Paged caches with NaN in all unused places, and attention over them in plain PyTorch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels.paged.call import PagedCall

# Id of a block that does not exist, for entries of the table that must not be read.
NO_BLOCK = 2**31 - 648


@dataclass(frozen=True)
class PagedCase:
    """Requests whose cache blocks are in random order, with NaN where nothing may be read."""

    query_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    heads: int = 3
    block_size: int = 16
    kv_lora_rank: int = 32
    rope: int = 16
    dtype: torch.dtype = torch.bfloat16
    # Of queries.
    magnitude: float = 1.0
    # Tokens that are in no row, behind those that are.
    padding: int = 0
    # First key in the cache and one past the last; None: all.
    window: tuple[int, int | None] | None = None
    # Rows, the first ones, whose tokens see all their keys.
    prefixes: int = 0
    # Where rows begin on the token axis; None: one behind the other.
    starts: tuple[int, ...] | None = None

    @property
    def scale(self) -> float:
        return (self.kv_lora_rank + self.rope) ** -0.5

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0):
        """Query, rope query, cache, rows and scale."""
        make = torch.Generator().manual_seed(seed)
        latents = [
            self._random(make, keys, self.kv_lora_rank + self.rope) for keys in self.kv_lengths
        ]
        cache, table = self._cache(latents)
        tokens = sum(self.query_lengths)
        query = []
        for width in (self.kv_lora_rank, self.rope):
            # Every other column, of twice the heads: no stride is that of a new tensor.
            whole = torch.full((tokens + self.padding, 2 * self.heads, 2 * width), torch.nan)
            part = whole.to(self.dtype)[:, : self.heads, ::2]
            part[:tokens] = self._random(make, tokens, self.heads, width) * self.magnitude
            query.append(part.to(device))
        rows = Rows.of(self.query_lengths, self.kv_lengths, table.to(device))
        rows = replace(rows, prefixes=self.prefixes)
        if self.starts is not None:
            query = [part.nan_to_num(0.5) for part in query]
            starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
            rows = replace(rows, query_starts=starts)
        return *query, cache.to(device), rows, self.scale

    def _cache(self, latents: list[Tensor]) -> tuple[Tensor, Tensor]:
        size = self.block_size
        start, end = self.window or (0, None)
        held = [latent[start:end] for latent in latents]
        width = max(-(-len(latent) // size) for latent in held) + 1
        number = sum(-(-len(latent) // size) for latent in held)
        # Blocks of a larger buffer, and fewer of them in use than there are.
        shape = (2 * number + 3, size + 1, self.kv_lora_rank + self.rope + 8)
        cache = torch.full(shape, torch.nan, dtype=self.dtype)[:, :size, :-8]
        order = iter(torch.randperm(len(cache)).tolist())
        table = torch.full((len(held), width), NO_BLOCK, dtype=torch.int32)
        for row, latent in enumerate(held):
            for column, first in enumerate(range(0, len(latent), size)):
                part = latent[first : first + size]
                table[row, column] = block = next(order)
                cache[block, : len(part)] = part
        return cache, table

    def _random(self, make: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=make).to(self.dtype)


# Prefixes of 3 + 3 and 4 tokens and of none, of tokens 1 - 6 and 8 - 11; rows of 3, 3, 1, 3, 1, 2
# and no tokens, behind these and in no prefix, out of order; token 0 is in no row.
TWO_ROWS = PagedCase(
    (6, 4, 0, 3, 3, 1, 3, 1, 2, 0),
    (200, 67, 9, 3, 70, 130, 6, 64, 4, 5),
    starts=(1, 8, 0, 4, 1, 7, 8, 11, 12, 0),
    prefixes=3,
)


def call_of(inputs, window=(0, None), **how) -> PagedCall:
    """The kernels' arguments for what ``PagedCase.inputs`` gives."""
    *operands, rows, scale = inputs
    lists = rows.query_starts, rows.query_lengths, rows.kv_lengths, rows.block_table
    most = rows.max_query_length, rows.max_kv_length
    return PagedCall(*operands, *lists, *most, scale, *window, prefixes=rows.prefixes, **how)


def naive(
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    rows: Rows,
    scale: float,
    key_start: int = 0,
    key_end: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE in fp64 on a CPU, one token after the other."""
    tokens, heads, width = q_content.shape
    out = torch.zeros(tokens, heads, width, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for row in range(len(rows)):
        start, length = int(rows.query_starts[row]), int(rows.query_lengths[row])
        for index in range(length):
            last = int(rows.kv_lengths[row]) - (1 if row < rows.prefixes else length - index)
            keys = torch.arange(max(last + 1, 0))
            end = last + 1 if key_end is None else key_end
            keys = keys[(keys >= key_start) & (keys < end)] - key_start
            if not len(keys):
                continue
            blocks = rows.block_table[row][keys // cache.shape[1]].long()
            k = cache[blocks, keys % cache.shape[1]].double()
            q = torch.cat((q_content[start + index], q_rope[start + index]), dim=-1).double()
            scores = q @ k.T * scale
            token, before = start + index, lse[start + index].clone()
            lse[token] = before.logaddexp(scores.logsumexp(-1))  # of another row, too
            out[token] *= (before - lse[token]).exp()[:, None]
            out[token] += (scores - lse[token][:, None]).exp() @ k[:, :width]
    return out, lse


def fp8_inputs(case: PagedCase, device: torch.device | str = "cpu", inputs=None):
    """``inputs``, those of the case by default, with the cache in FP8 rows of a buffer of NaN."""
    q_content, q_rope, cache, rows, scale = inputs or case.inputs(device)
    encoded = Fp8Latents(case.kv_lora_rank, case.rope).encode(cache)
    blocks, size, width = encoded.shape
    # Bytes of ones are NaN in e4m3, fp32 and bf16.
    buffer = torch.full((blocks, size + 1, width + 16), 0xFF, dtype=torch.uint8, device=device)
    placed = buffer[:, :size, :width]
    placed.copy_(encoded)
    return q_content, q_rope, placed, rows, scale
