"""Launcher of the Hopper decode kernels: attention over a paged latent cache."""

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
from absorbed_mla.kernels.paged.call import PagedCall
from absorbed_mla.kernels.paged.combine import combine, places
from absorbed_mla.kernels.paged.forward import keys_of
from absorbed_mla.kernels.paged.merge_rows import merge_rows
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


def forward(call: PagedCall, table: Schedule | None = None) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over the cached latents of their requests; see paged/forward.py.

    With ``batch_invariant`` keys are added up in pieces of ``PIECE``, each by itself. With at most
    ``PIECE`` keys a token's result is bitwise that of forward.py. Over FP8 rows it is that over
    latents that were decoded before.

    Args:
        call: The arguments: queries in bf16 or fp16; C = 128, 256 or 512; R = 16, 32 or 64;
            block_size a multiple of ``LEAST_PAGE``, any if one block holds all keys or the cache
            has FP8 rows.
        table: As there.

    Returns:
        As there.

    Raises:
        ValueError: The scale is not positive, or the copy engine cannot load the cache as it lies.
    """
    q_content, q_rope, cache = call[:3]
    assert not (call.prefixes and call.batch_invariant), "pieces of prefixes are not merged"
    if call.scale <= 0:
        raise ValueError(f"scale must be positive, got {call.scale}")
    tokens = len(q_content)
    out, lse = call.results(tokens)
    if not call.has_keys:
        return out.zero_(), lse.fill_(-math.inf)
    if not tokens:
        return out, lse
    division = divide(call)
    tiles, split_kv = division.tiles, division.split_kv
    table = table or schedule(*call.lengths, call.key_start, division, call.prefixes, tokens)
    shape = (places(split_kv), tiles.head_blocks, tiles.heads * tiles.tokens)
    with not_filled():
        waiting = out.new_empty((*shape, out.shape[-1]), dtype=torch.float32), lse.new_empty(shape)
        whole = call.results(call.row_tokens) if call.prefixes else (out, lse)
    block_table = call.block_table
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    queries = _query_maps(q_content, q_rope, tiles)
    widths, rows = (out.shape[-1], q_rope.shape[-1]), shape[-1]
    page = page_size(cache.shape[1], call.window)
    keys: _Keys = _fp8_keys(cache) if call.fp8 else _key_maps(cache, *widths, page)
    programs = split_kv.parts * tiles.head_blocks
    results: tuple[Tensor | int, ...] = *whole, *waiting
    constants: dict[str, int] = {"SPLIT": split_kv.splits}
    if call.batch_invariant and _is_long(call.window) and not split_kv.splits:
        kernel, constants = attend_fp8_decode_pieces if call.fp8 else attend_decode_pieces, {}
        programs = min(programs, split_kv.programs)
        with not_filled():
            sums = lse.new_empty(programs, ROWS.value, widths[0])
        results = out, lse, sums, split_kv.parts
    elif rows in _FEW_ROWS:
        kernel, keys = attend_few_rows, (*_fp8_maps(cache, *widths, page), *keys)
        constants |= {"ROWS": rows, "PIECES": _FEW_ROWS[rows], "AHEAD": _BLOCKS_AHEAD}
    else:
        kernel = attend_fp8_decode if call.fp8 else attend_decode
    lists = *table[:2], block_table
    _launch(kernel, programs, queries, keys, lists, results, call, tiles, constants)
    if call.prefixes:
        merge_rows(waiting, whole, table, tiles, (out, lse))
    elif split_kv.splits:
        order = {"in_order": call.batch_invariant}
        combine(*waiting, table, tiles, split_kv, call.lengths[:2], (out, lse), **order)
    else:
        clear_padding(*call.lengths[:2], out, lse)
    return out, lse


def divide(call: PagedCall) -> plan.Division:
    """Query tiles and KV splits of :func:`forward`."""
    heads = call.q_content.shape[1]
    rows, num_splits = ROWS.value, call.num_splits
    # In parity mode a token's result must not depend on how many there are.
    if not call.batch_invariant and _has_pieces(call):
        wanted = plan.power_of_two(heads) * call.max_query_length
        rows = next((few for few in _FEW_ROWS if wanted <= few), rows)
    tiles = plan.tiles_for(call.requests, heads, call.row_tokens, call.max_query_length, rows)
    if call.batch_invariant:
        few = _is_long(call.window) and _leave_some_idle(tiles, call.window, call.q_content)
        # A program for each piece; else each has whole tiles.
        num_splits = -(PIECE.value // KEYS.value) if few else 1
    device = call.q_content.device
    split_kv = plan.split_kv_for(tiles, call.window, KEYS.value, 1, device, num_splits)
    return plan.Division(tiles, split_kv, KEYS.value, call.window)


def _is_long(window: int) -> bool:
    """Whether keys are added up in pieces in parity mode."""
    return window > PIECE.value


def _leave_some_idle(tiles: plan.Tiles, window: int, q_content: Tensor) -> bool:
    """Whether tiles are too few for the device, and outputs of their pieces few enough to wait."""
    programs = tiles.max_tiles * tiles.head_blocks
    row_bytes = q_content.shape[-1] * torch.float32.itemsize
    waiting = 2 * -(-window // PIECE.value) * programs * ROWS.value * row_bytes
    return programs < plan.processors(q_content.device) and waiting <= _MOST_WAITING


def _has_pieces(call: PagedCall) -> bool:
    """Whether the cache has FP8 rows that fp8_pieces.py can load."""
    if not call.fp8 or call.q_content.dtype != torch.bfloat16 or not has_map(call.cache):
        return False
    kv_lora_rank = call.q_content.shape[-1]
    _, scales, k_rope = keys_of(call.cache, kv_lora_rank, call.q_rope.shape[-1])
    whole = kv_lora_rank % GROUP == 0 and has_map(k_rope) and has_map(scales)
    return whole and page_size(call.cache.shape[1], call.window) >= LEAST_PAGE


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


def _launch(
    kernel: JITFunction,
    programs: int,
    queries: tuple[TensorDescriptor, ...],
    keys: _Keys,
    lists: tuple[Tensor, ...],
    results: tuple[Tensor | int, ...],
    call: PagedCall,
    tiles: plan.Tiles,
    constants: dict[str, int],
) -> None:
    """Run a kernel, by whose first results its arguments differ; lists end with the block table."""
    _, heads, kv_lora_rank = call.q_content.shape
    launch(
        kernel,
        (programs,),
        *queries,
        *keys,
        *lists,
        *results,
        call.cache.shape[1],
        lists[-1].stride(0),
        heads,
        tiles.head_blocks,
        call.scale / math.log(2),
        HEADS=tiles.heads,
        C=kv_lora_rank,
        R=call.q_rope.shape[-1],
        num_warps=4,
        **constants,
    )
