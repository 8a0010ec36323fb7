"""Attention over a paged latent cache on Hopper GPUs: the launch of the decode kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from triton import JITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from absorbed_mla.kernels.fp8_latents import GROUP
from absorbed_mla.kernels.hopper.decode_kernel import attend_decode
from absorbed_mla.kernels.hopper.decode_pieces_kernel import attend_decode_pieces
from absorbed_mla.kernels.hopper.few_rows_kernel import attend_few_rows
from absorbed_mla.kernels.hopper.fp8_decode_pieces_kernel import attend_fp8_decode_pieces
from absorbed_mla.kernels.hopper.fp8_rows import UNIT, attend_fp8_decode
from absorbed_mla.kernels.hopper.layouts import SWIZZLED
from absorbed_mla.kernels.hopper.pieces import PIECE
from absorbed_mla.kernels.hopper.tensor_map import has_map, tensor_map
from absorbed_mla.kernels.hopper.tile import KEYS, ROWS
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.paged import plan
from absorbed_mla.kernels.paged.combine import combine, places
from absorbed_mla.kernels.paged.forward import keys_of
from absorbed_mla.kernels.paged.padding import clear_padding
from absorbed_mla.kernels.paged.schedule import Schedule, schedule
from absorbed_mla.kernels.scratch import not_filled

# Keys that one copy loads, at least: 8 would be possible, but are a KiB only.
LEAST_PAGE = 16
# As in forward.py, where all keys of a copy's block lie together.
_CHUNKS = 4
# Rows of tiles in which keys are the rows of the products, and how many pieces of FP8 rows fit into
# shared memory beside their queries.
_FEW_ROWS = {16: 7, 32: 4}
# Blocks of keys that these ask for before, as far as the L2 cache.
_BLOCKS_AHEAD = 1
# Bytes of outputs of pieces that may wait for each other.
_MOST_WAITING = 2**29
# What kernels take of keys: tensor maps, or of FP8 rows what ``_fp8_keys`` gives.
_Keys = tuple[TensorDescriptor | Tensor | int, ...]


def page_size(block_size: int, window: int) -> int:
    """Keys that one copy loads: as many as always lie in one block of the cache, at most a tile's.

    Args:
        block_size: Tokens in a block of the cache; one that is no multiple of ``LEAST_PAGE`` has
            pages smaller than that, which :func:`forward` refuses.
        window: Keys in the cache. If they are all in one block, that ends where no key is wanted
            any more: what a copy loads behind it is zero.
    """
    return KEYS.value if window <= block_size else math.gcd(block_size, KEYS.value)


def forward(
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    query_starts: Tensor,
    query_lengths: Tensor,
    kv_lengths: Tensor,
    block_table: Tensor,
    max_query_length: int,
    max_kv_length: int,
    scale: float,
    key_start: int,
    key_end: int | None,
    batch_invariant: bool,
    num_splits: int | None,
    table: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over the cached latents of their requests; see paged/forward.py.

    Args:
        q_content: [T, N, C] in bf16 or fp16; C = 128, 256 or 512.
        q_rope: [T, N, R]; R = 16, 32 or 64.
        cache: [blocks, block_size, C + R]; block_size a multiple of ``LEAST_PAGE``, any if one
            holds all keys. Or FP8 rows as in paged/forward.py, any block size.
        query_starts: As in ``inference.rows.Rows``, like the next five; int32 [Q].
        query_lengths: Int32 [Q].
        kv_lengths: Int32 [Q].
        block_table: Int32 or int64 [Q, blocks of a request].
        max_query_length: Maximum new tokens of a request.
        max_kv_length: Maximum keys of a request.
        scale: Multiplies the scores.
        key_start: First key in the cache.
        key_end: One past the last key that is seen, or None.
        batch_invariant: Keys are added up in pieces of ``PIECE``, each by itself: a token's result
            then depends on its query and keys only. With at most ``PIECE`` keys it is bitwise that
            of forward.py. Over FP8 rows it is that over latents that were decoded before.
        num_splits: Splits of the keys of every request; None: the device chooses.
        table: Of the batch, as ``operators.paged_schedule`` makes it for all layers of a step;
            None: it is made.

    Returns:
        Output [T, N, C] in the dtype of the query and LSE [T, N] in fp32; 0 and -inf for a token
        in no request, or that sees no key.

    Raises:
        ValueError: The scale is not positive, or the copy engine cannot load the cache as it lies.
    """
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    (tokens, heads, _), requests = q_content.shape, len(query_starts)
    out = torch.empty_like(q_content, memory_format=torch.contiguous_format)
    lse = q_content.new_empty((tokens, heads), dtype=torch.float32)
    window = plan.window_of(max_kv_length, key_start, key_end)
    if not (requests and max_query_length and window and cache.numel() and block_table.numel()):
        return out.zero_(), lse.fill_(-math.inf)
    if not tokens:
        return out, lse
    batch = requests, max_query_length, window
    division = divide(q_content, q_rope, cache, *batch, batch_invariant, num_splits)
    tiles, split_kv = division.tiles, division.split_kv
    table = table or schedule(query_starts, query_lengths, kv_lengths, key_start, division)
    shape = (places(split_kv), tiles.head_blocks, tiles.heads * tiles.tokens)
    with not_filled():
        waiting = out.new_empty((*shape, out.shape[-1]), dtype=torch.float32), lse.new_empty(shape)
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    queries = _query_maps(q_content, q_rope, tiles)
    widths, block_size = (out.shape[-1], q_rope.shape[-1]), cache.shape[1]
    rows, page, constants = shape[-1], page_size(block_size, window), {}
    fp8 = cache.dtype == torch.uint8
    keys: _Keys = _fp8_keys(cache) if fp8 else _key_maps(cache, *widths, page)
    if batch_invariant and _is_long(window) and not split_kv.splits:
        kernel = attend_fp8_decode_pieces if fp8 else attend_decode_pieces
        result = out, lse
        _launch_pieces(
            kernel, queries, keys, table, block_table, result, block_size, scale, division
        )
        clear_padding(query_starts, query_lengths, out, lse)
        return out, lse
    kernel = attend_fp8_decode if fp8 else attend_decode
    if rows in _FEW_ROWS:
        kernel, keys = attend_few_rows, (*_fp8_maps(cache, *widths, page), *keys)
        constants = {"ROWS": rows, "PIECES": _FEW_ROWS[rows], "AHEAD": _BLOCKS_AHEAD}
    results = out, lse, *waiting
    _launch(
        kernel, queries, keys, table, block_table, results, block_size, scale, division, constants
    )
    if split_kv.splits:
        lists, result = (query_starts, query_lengths), (out, lse)
        combine(*waiting, table, tiles, split_kv, lists, result, in_order=batch_invariant)
    else:
        clear_padding(query_starts, query_lengths, out, lse)
    return out, lse


def divide(
    q_content: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    requests: int,
    max_query_length: int,
    window: int,
    batch_invariant: bool,
    num_splits: int | None,
) -> plan.Division:
    """As ``divide`` of paged/forward.py."""
    tokens, heads, _ = q_content.shape
    rows = ROWS.value
    # In parity mode a token's result must not depend on how many there are.
    if not batch_invariant and _has_pieces(q_content, q_rope, cache, window):
        wanted = plan.power_of_two(heads) * max_query_length
        rows = next((few for few in _FEW_ROWS if wanted <= few), rows)
    tiles = plan.tiles_for(requests, heads, tokens, max_query_length, rows)
    if batch_invariant:
        few = _is_long(window) and _leave_some_idle(tiles, window, q_content)
        # A program for each piece; else each has whole tiles.
        num_splits = -(PIECE.value // KEYS.value) if few else 1
    split_kv = plan.split_kv_for(tiles, window, KEYS.value, 1, q_content.device, num_splits)
    return plan.Division(tiles, split_kv, KEYS.value, window)


def _is_long(window: int) -> bool:
    """Whether keys are added up in pieces in parity mode."""
    return window > PIECE.value


def _leave_some_idle(tiles: plan.Tiles, window: int, q_content: Tensor) -> bool:
    """Whether tiles are too few for the device, and outputs of their pieces few enough to wait."""
    programs = tiles.max_tiles * tiles.head_blocks
    row_bytes = q_content.shape[-1] * torch.float32.itemsize
    waiting = 2 * -(-window // PIECE.value) * programs * ROWS.value * row_bytes
    return programs < plan.processors(q_content.device) and waiting <= _MOST_WAITING


def _has_pieces(q_content: Tensor, q_rope: Tensor, cache: Tensor, window: int) -> bool:
    """Whether the cache has FP8 rows that fp8_pieces.py can load."""
    if cache.dtype != torch.uint8 or q_content.dtype != torch.bfloat16 or not has_map(cache):
        return False
    kv_lora_rank = q_content.shape[-1]
    _, scales, k_rope = keys_of(cache, kv_lora_rank, q_rope.shape[-1])
    whole = kv_lora_rank % GROUP == 0 and has_map(k_rope) and has_map(scales)
    return whole and page_size(cache.shape[1], window) >= LEAST_PAGE


def _query_maps(
    q_content: Tensor, q_rope: Tensor, tiles: plan.Tiles
) -> tuple[TensorDescriptor, ...]:
    """Tensor maps of q_content and q_rope; where a tile has one token, its other rows are zeros."""
    box = (1, tiles.tokens) if tiles.max_tokens == 1 else (tiles.tokens, 1)
    queries = q_content.unsqueeze(1), q_rope.unsqueeze(1)
    return tuple(tensor_map(q, (*box, tiles.heads, q.shape[-1])) for q in queries)


def _key_maps(
    cache: Tensor, kv_lora_rank: int, rope: int, page: int
) -> tuple[TensorDescriptor, ...]:
    """Tensor maps of latent and k_rope."""
    if page < LEAST_PAGE or not has_map(cache):
        raise ValueError(
            f"paged_attention_backend='hopper' needs a cache whose block size is a multiple of "
            f"{LEAST_PAGE} and whose blocks and tokens lie multiples of 16 bytes apart; got "
            f"{tuple(cache.shape)} with strides {cache.stride()} in {cache.dtype}; 'triton' takes "
            "any"
        )
    # Columns that arrive together; rows of a smaller page lie together in so many columns only.
    chunk = max(kv_lora_rank // _CHUNKS, SWIZZLED.value) if page == KEYS.value else SWIZZLED.value
    keys = cache.transpose(0, 1)
    return (
        tensor_map(keys[..., :kv_lora_rank], (page, 1, chunk)),
        tensor_map(keys[..., kv_lora_rank:], (page, 1, rope)),
    )


def _fp8_maps(
    cache: Tensor, kv_lora_rank: int, rope: int, page: int
) -> tuple[TensorDescriptor, ...]:
    """Tensor maps of values, k_rope and scales of FP8 rows."""
    rows, scales, k_rope = keys_of(cache.transpose(0, 1), kv_lora_rank, rope)
    words = rows[..., :kv_lora_rank].view(torch.int32)
    boxes = (words, GROUP // 4), (k_rope, rope), (scales, scales.shape[-1])
    return tuple(tensor_map(part, (page, 1, width)) for part, width in boxes)


def _fp8_keys(cache: Tensor) -> tuple[Tensor | int, ...]:
    """What kernels take of FP8 rows, from ``words`` to ``together``."""
    if not has_map(cache):
        raise ValueError(
            f"paged_attention_backend='hopper' needs a cache of FP8 rows whose blocks and rows lie "
            f"multiples of 16 bytes apart; got {tuple(cache.shape)} with strides {cache.stride()}"
        )
    words = cache.view(torch.int32)
    together = cache.stride(1) == cache.shape[2] and cache.shape[1] % KEYS.value == 0
    size = KEYS.value * cache.shape[2] if together else 0
    return words, *(stride // UNIT.value for stride in words.stride()[:2]), size


def _launch_pieces(
    kernel: JITFunction,
    queries: tuple[TensorDescriptor, ...],
    keys: _Keys,
    table: Schedule,
    block_table: Tensor,
    result: tuple[Tensor, Tensor],
    block_size: int,
    scale: float,
    division: plan.Division,
) -> None:
    """Run a kernel that adds up the pieces of a tile's keys; see there."""
    tiles, split_kv, _, _ = division
    out, lse = result
    programs = min(split_kv.parts * tiles.head_blocks, split_kv.programs)
    with not_filled():
        sums = lse.new_empty(programs, ROWS.value, out.shape[2])
    launch(
        kernel,
        (programs,),
        *queries,
        *keys,
        *table,
        block_table,
        out,
        lse,
        sums,
        split_kv.parts,
        block_size,
        block_table.stride(0),
        out.shape[1],
        tiles.head_blocks,
        scale / math.log(2),
        HEADS=tiles.heads,
        C=out.shape[2],
        R=queries[1].block_shape[-1],
        num_warps=4,
    )


def _launch(
    kernel: JITFunction,
    queries: tuple[TensorDescriptor, ...],
    keys: _Keys,
    table: Schedule,
    block_table: Tensor,
    results: tuple[Tensor, ...],
    block_size: int,
    scale: float,
    division: plan.Division,
    constants: dict[str, int],
) -> None:
    """Run a kernel; its arguments are described there."""
    tiles, split_kv, _, _ = division
    heads, kv_lora_rank = results[0].shape[1:]
    launch(
        kernel,
        (split_kv.parts * tiles.head_blocks,),
        *queries,
        *keys,
        *table,
        block_table,
        *results,
        block_size,
        block_table.stride(0),
        heads,
        tiles.head_blocks,
        scale / math.log(2),
        HEADS=tiles.heads,
        C=kv_lora_rank,
        R=queries[1].block_shape[-1],
        SPLIT=split_kv.splits,
        num_warps=4,
        **constants,
    )
