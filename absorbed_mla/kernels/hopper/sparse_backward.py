"""Launcher of the Hopper sparse attention backward over chosen keys."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import Tensor

from absorbed_mla.kernels.dsa.key_lists import HeadTile, KeyLists, key_lists, query_tile
from absorbed_mla.kernels.dsa.scatter_add import add_in_order, parts_dtype
from absorbed_mla.kernels.hopper.key_rows import in_order
from absorbed_mla.kernels.hopper.sparse_backward_kernel import attend_sparse_backward
from absorbed_mla.kernels.hopper.sparse_forward import rows_of_16_bytes
from absorbed_mla.kernels.hopper.tensor_map import tensor_map
from absorbed_mla.kernels.hopper.tile import ROWS
from absorbed_mla.kernels.latent_backward import LatentBackward
from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.triton.backward import delta_of


def backward(
    call: LatentBackward, chosen: Tensor, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what ``sparse_forward.attend`` took.

    Args:
        call: The arguments.
        chosen: int32 [S_q, B, topk], -1 for none, anywhere.
        deterministic: Whether the result must be the same in every run, to the bit; see
            scatter_add.py.

    Returns:
        As :class:`LatentBackward` says.
    """
    dq, dkv, keys = call.empty_query_gradients(), call.zero_key_gradients(), len(call.latent)
    if not keys or not call.lse.numel():
        return dq[0].zero_(), dq[1].zero_(), dkv
    call = call.cast()
    grad_out, grad_lse, out, lse, q_content, q_rope, latent, k_rope, scale = call
    statistics = lse.contiguous(), delta_of(grad_out, grad_lse, out)
    tile = query_tile(q_content.shape[2], ROWS.value, len(q_content), keys, least=ROWS.value)
    lists = key_lists(chosen, keys, tile.tokens)
    queries = q_content, q_rope, grad_out
    rows = rows_of_16_bytes(latent, k_rope)
    gradients = _Gradients(queries, rows, statistics, dq, lists, tile, scale)
    if not deterministic:
        gradients.of_tiles(slice(0, len(lists.counts)), dkv, in_order=False)
        return *dq, in_order(dkv)
    write = partial(gradients.of_tiles, in_order=True)
    add_in_order(dkv, lists, tile.blocks, parts_dtype(q_content.dtype), write)
    return *dq, in_order(dkv)


class _Gradients(NamedTuple):
    """What all launches of the kernel have in common."""

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor | int, ...]
    statistics: tuple[Tensor, Tensor]
    dq: tuple[Tensor, ...]
    lists: KeyLists
    tile: HeadTile
    scale: float

    def of_tiles(self, tiles: slice, dkv: Tensor, in_order: bool) -> None:
        """Write dQ of some tiles, and what their keys get; see the kernel's ``dkv``."""
        q_content, q_rope, grad_out = self.queries
        queries, batch, heads, kv_lora_rank = q_content.shape
        rope = q_rope.shape[3]
        box = self.tile.tokens, 1, self.tile.heads
        launch(
            attend_sparse_backward,
            ((tiles.stop - tiles.start) * batch * self.tile.blocks,),
            tensor_map(q_content, (*box, kv_lora_rank)),
            tensor_map(q_rope, (*box, rope)),
            tensor_map(grad_out, (*box, kv_lora_rank)),
            *self.keys,
            *self.statistics,
            *self.lists[:3],
            *self.dq,
            dkv,
            tiles.start,
            self.lists.entries.shape[2],
            queries,
            batch,
            heads,
            self.scale,
            C=kv_lora_rank,
            R=rope,
            HEADS=self.tile.heads,
            IN_ORDER=in_order,
            num_warps=8,
        )
