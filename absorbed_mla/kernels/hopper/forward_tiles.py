"""Persistent tile scheduler: the tiles that a program computes one after the other."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from absorbed_mla.kernels.hopper.tile import read_tile
from absorbed_mla.kernels.triton_private import aggregate


@aggregate
class ProgramTiles:
    """Tiles of the table, longest first, dealt to the programs to and fro: 0, 1, 2, 2, 1, 0, 0, ..

    So all programs have about as many keys, and in each turn neighbours read the same ones.

    It has few attributes, and tiles are read from the table again where they are wanted again,
    because the products' registers leave room for little else.

    Attributes:
        tiles: int32 [tiles, 5], contiguous, see ``query_tiles`` in tiles.py.
        total: Tiles of all entries of the batch and groups of heads.
        batches: B.
        heads: N.
        HEADS: Heads in a tile.
    """

    tiles: gl.tensor
    total: gl.tensor
    batches: gl.tensor
    heads: gl.tensor
    HEADS: gl.constexpr

    @gluon.jit
    def count(self):
        """How many the program has."""
        return count_turns(self.total)

    @gluon.jit
    def tile(self, turn):
        """One of them."""
        return read_tile(self.tiles, dealt(turn), self.batches, self.heads, self.HEADS)


@gluon.jit
def count_turns(total):
    """How many of ``total`` tiles the program gets."""
    turns = total // gl.num_programs(0)
    return turns + gl.where(dealt(turns) < total, 1, 0)


@gluon.jit
def dealt(turn):
    """The number of the tile that the program gets in a turn."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
