"""Launcher of the sparse attention backward over chosen keys.

One program has a tile of rows. One launch computes their dQ, another adds what blocks of keys get
from them to dKV in global memory, in any order; both compute the probabilities. The deterministic
variant keeps what every entry of the lists gets in a buffer, for some tiles at a time, and adds it
up key by key in the order of the tiles (``scatter_add.py``): the same bits in every run, for a
buffer of up to 2 GiB and one more writing and reading of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from absorbed_mla.kernels.dsa.backward_kernel import backward_kernel
from absorbed_mla.kernels.dsa.key_lists import HeadTile, KeyLists, key_lists, query_tile
from absorbed_mla.kernels.dsa.scatter_add import add_in_order, parts_dtype
from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.triton.backward import rows_of
from absorbed_mla.kernels.triton.common import interpreted, precision, strides_of
from absorbed_mla.kernels.triton.launch import Launch, launch_for

# Columns of one product, and most rows of a tile: the most that need no stack on Hopper.
_COLUMNS, _ROWS = 128, 32


def backward(
    call: LatentBackward, chosen: Tensor, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``forward.attend`` took.

    Args:
        call: The arguments.
        chosen: int32 [S_q, B, topk], -1 for none, anywhere.
        deterministic: Whether the result must be the same in every run, to the bit.

    Returns:
        As :class:`LatentBackward` says.
    """
    dq, dkv = call.empty_query_gradients(), call.zero_key_gradients()
    queries, _, heads, kv_lora_rank = call.q_content.shape
    dtype, keys = call.q_content.dtype, len(call.latent)
    launch = launch_for(dtype, kv_lora_rank, call.k_rope.shape[-1], call.latent.device)
    tile = query_tile(heads, min(_ROWS, launch.query.rows), queries, keys, least=16)
    lists = key_lists(chosen, keys, tile.tokens)
    gradients = _Gradients(rows_of(call), dq, lists, tile, call.scale, launch)
    if not deterministic:
        gradients.of_tiles(slice(0, len(lists.entries)), dkv, in_order=False)
        return *dq, dkv
    write = partial(gradients.of_tiles, in_order=True)
    add_in_order(dkv, lists, tile.blocks, parts_dtype(dtype), write)
    return *dq, dkv


class _Gradients(NamedTuple):
    """What all launches of the kernel have in common."""

    operands: tuple[Tensor, ...]
    dq: tuple[Tensor, ...]
    lists: KeyLists
    tile: HeadTile
    scale: float
    launch: Launch

    def of_tiles(self, tiles: slice, dkv: Tensor, in_order: bool) -> None:
        """Write dQ of some tiles, and what their keys get.

        Args:
            tiles: Which.
            dkv: [S_k, B, C + R], added to; or in_order [tiles * B * L * blocks, C + R], written.
            in_order: Whether every entry has a place of its own.
        """
        q_content, q_rope = self.operands[:2]
        _, batch, heads, kv_lora_rank = q_content.shape
        grid = ((tiles.stop - tiles.start) * self.tile.blocks, batch)
        if not all(grid):
            return
        blocks = self.launch.query
        for of_keys in (False, True):
            backward_kernel[grid](
                *self.operands,
                *self.dq,
                dkv,
                *self.lists[:2],
                *strides_of(*self.operands[:5]),
                tiles.start,
                len(q_content),
                heads,
                self.tile.blocks,
                self.lists.entries.shape[2],
                self.scale,
                C=kv_lora_rank,
                R=q_rope.shape[3],
                CHUNK=min(_COLUMNS, kv_lora_rank),
                HB=self.tile.heads,
                TOKENS=self.tile.tokens,
                BLOCK_N=blocks.keys,
                OF_KEYS=of_keys,
                IN_ORDER=in_order,
                PRECISION=precision(q_content.dtype),
                INTERPRETED=interpreted(),
                num_warps=self.launch.warps,
                num_stages=1,
            )
