"""Keys of the decode kernel in the blocks of a cache that tensor maps load."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from absorbed_mla.kernels.hopper.forward_scores import count_blocks
from absorbed_mla.kernels.hopper.forward_shared import STAGES, chunk_full
from absorbed_mla.kernels.hopper.ring import empty_position
from absorbed_mla.kernels.hopper.tile import KEYS
from absorbed_mla.kernels.triton_private import aggregate


@aggregate
class PagedKeys:
    """Where keys are; one warp loads them. A copy loads keys of one block of the cache, at most 64.

    Attributes:
        latent: Tensor map of [block_size, blocks, C] in boxes [keys that lie together, 1, columns
            that arrive together].
        k_rope: Of [block_size, blocks, R] in boxes [keys that lie together, 1, R].
        block_table: [Q, blocks of a request], int32 or int64, last axis contiguous.
        block_size: Keys in a block of the cache.
        table_stride: Of ``block_table``.
    """

    latent: tma.tensor_descriptor
    k_rope: tma.tensor_descriptor
    block_table: gl.tensor
    block_size: gl.tensor
    table_stride: gl.tensor

    @gluon.jit
    def load(self, tile, shared, blocks):
        """Load each block as soon as the block before last is done with its stage.

        Where keys lie is looked up before that, so that the answer is there when the stage is free.

        Args:
            tile: The tile.
            shared: What ``allocate`` gave.
            blocks: Of the tiles before.
        """
        HALF: gl.constexpr = shared.C // 2
        for block in range(count_blocks(tile)):
            stage, parity = empty_position(blocks + block, STAGES)
            pages = self.find_pages(tile, block)
            mbarrier.wait(shared.left_empty.index(stage), parity)
            for column in gl.static_range(0, HALF, shared.CHUNK):
                full = chunk_full(shared, stage, column)
                chunk = shared.left.index(stage).slice(column, shared.CHUNK, dim=2)
                load_pages(self.latent, pages, column, full, chunk)
            mbarrier.wait(shared.right_empty.index(stage), parity)
            for column in gl.static_range(HALF, shared.C, shared.CHUNK):
                full = chunk_full(shared, stage, column)
                chunk = shared.right.index(stage).slice(column - HALF, shared.CHUNK, dim=2)
                load_pages(self.latent, pages, column, full, chunk)
            load_pages(self.k_rope, pages, 0, shared.rope_full.index(stage), shared.k_rope(stage))

    @gluon.jit
    def find_pages(self, tile, block):
        """Where the keys of a block of the tile lie in the cache.

        Returns:
            For each page the block of the cache and its first place there, int32. Pages behind the
            tile's last key are that key's: entries of the table beyond it may be anything.
        """
        PAGE: gl.constexpr = self.k_rope.block_shape[0]
        entries = self.block_table + tile.request.to(gl.int64) * self.table_stride
        last = (tile.key_start + gl.maximum(tile.keys, 1) - 1) // PAGE * PAGE
        pages = ()
        for page in gl.static_range(0, KEYS, PAGE):
            key = gl.minimum(tile.key_start + block * KEYS + page, last)
            found = gl.load(entries + key // self.block_size).to(gl.int32), key % self.block_size
            pages += (found,)  # type: ignore[assignment]  # unrolled: as many as there are pages
        return pages


@gluon.jit
def load_pages(keys, pages, column: gl.constexpr, full, place):
    """Load columns of a block of keys to their place, [64, 1, columns]."""
    PAGE: gl.constexpr = keys.block_shape[0]
    mbarrier.expect(full, KEYS // PAGE * keys.block_type.nbytes)
    for page in gl.static_range(KEYS // PAGE):
        cache_block, slot = pages[page]
        target = place.slice(page * PAGE, PAGE, dim=0)
        tma.async_copy_global_to_shared(keys, [slot, cache_block, column], full, target)
