"""Sort keys and softmax weights of tokens, as device functions.

A token's key is an int32 of the order of its logit: the bits of the logit in fp32, of which 16-bit
logits need the first ones only. Its weight is its probability relative to that of the most likely
token, as an integer of scale 2**40.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from absorbed_mla.kernels.triton_private import sum_combine

SCALE = tl.constexpr(2.0**40)
# A count in the bits above a sum of weights, of at most 2,048 tokens: 12 bits above 52.
COUNT = tl.constexpr(52)
ONE = tl.constexpr(1 << 52)
_SUM = tl.constexpr((1 << 52) - 1)
# The bits in order of minus infinity, of NaN, and of nothing, which is below both.
LOWEST = tl.constexpr(-0x7F800001)
NAN = tl.constexpr(0x7F800001)
NOTHING = tl.constexpr(-0x80000000)

# Last bits of fp32 that a type has not.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


def unused_bits(dtype: torch.dtype) -> int:
    """How many bits of fp32 the keys of logits of this type leave out."""
    return _UNUSED_BITS[dtype]


@triton.jit
def cumsum(x):
    """Sums of a vector's numbers up to each, itself included."""
    return tl.associative_scan(x, 0, sum_combine)


@triton.jit
def ordered(logits):
    """The bits of fp32 as int32 of the same order; of 0 and -0 the same, of NaN the largest."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    bits = tl.where(logits == logits, bits, NAN)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def logit_of(bits):
    """The number whose bits in order these are."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def is_number(logit):
    """Whether a row whose largest logit this is can be drawn from: neither NaN nor infinite."""
    return (logit > float("-inf")) & (logit < float("inf"))


@triton.jit
def load_block(row_ptr, block, vocabulary, BLOCK: tl.constexpr):
    """fp32 logits [BLOCK] of a block, and which of them are in the vocabulary."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    logits = tl.load(row_ptr + token, mask=inside, other=float("-inf"))
    return logits.to(tl.float32), inside


@triton.jit
def keys_of(logits, inside, UNUSED: tl.constexpr):
    """Keys of logits; below all others outside of the vocabulary."""
    return tl.where(inside, ordered(logits), NOTHING) >> UNUSED


@triton.jit
def weights_of(logits, inside, most, temperature, min_p):
    """Weights, int64, 0 outside of the vocabulary.

    All kernels that ask for a token's weight get the same bits: there is nothing here that a
    compiler may contract, such as a product with a sum behind it.

    Args:
        logits: fp32, no NaN.
        inside: Whether they are in the vocabulary.
        most: The largest of the row, a finite number.
        temperature: fp32.
        min_p: fp32; smaller shares of the most likely token's probability count as 0.
    """
    relative = (logits - most) * (1.0 / temperature)
    share = tl.exp(relative)
    share = tl.where(inside & (share >= min_p), share, 0.0)
    return (share * SCALE).to(tl.int64)


@triton.jit
def sum_in(counted):
    """The sum of weights in a number that holds a count above it."""
    return counted & _SUM


@triton.jit
def count_in(counted):
    """The count in a number that holds one above a sum of weights."""
    return (counted >> COUNT) & 0xFFF
