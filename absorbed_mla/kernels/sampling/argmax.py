"""Argmax of every row of logits: the first token with the largest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.vocabulary_blocks import BLOCK, WARPS, VocabularyBlocks
from absorbed_mla.kernels.sampling.weights import NOTHING, is_number, load_block, logit_of, ordered
from absorbed_mla.kernels.triton.common import max_of

# Bits of a token's number.
_TOKENS = tl.constexpr(0x7FFFFFFF)


def find_most_likely(logits: Tensor, block: int = BLOCK) -> Tensor:
    """The most likely token of each row, that of ``argmax``; -1 if the largest logit is no number.

    Args:
        logits: bf16, fp16 or fp32 [rows, vocabulary], last axis contiguous.
        block: Tokens of a program.

    Returns:
        int64 [rows].
    """
    blocks = VocabularyBlocks.of(logits, block)
    tokens = torch.empty(blocks.rows, dtype=torch.int64, device=logits.device)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(logits):
        launch_block_argmax(logits, blocks)
        launch(
            _argmax_kernel,
            (blocks.rows,),
            blocks.maxima,
            tokens,
            blocks.count,
            BLOCKS=blocks.width,
            num_warps=1,
        )
    return tokens


def launch_block_argmax(logits: Tensor, blocks: VocabularyBlocks) -> None:
    """The argmax of every block, to ``maxima``; zeros to ``records``."""
    length = blocks.records.shape[0] // blocks.rows
    launch(
        _block_argmax_kernel,
        (blocks.count, blocks.rows),
        logits,
        blocks.maxima,
        blocks.records,
        logits.stride(0),
        blocks.vocabulary,
        length,
        BLOCK=blocks.size,
        ZEROS=1 << (length - 1).bit_length(),
        num_warps=WARPS,
    )


@triton.jit
def _block_argmax_kernel(
    logits_ptr,
    maxima_ptr,
    records_ptr,
    stride_l,
    vocabulary,
    record_length,
    BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits, inside = load_block(logits_ptr + row * stride_l, block, vocabulary, BLOCK)
    bits = tl.where(inside, ordered(logits), NOTHING)
    most = max_of(bits)
    place = tl.arange(0, BLOCK)
    first = -max_of(tl.where(bits == most, -place, -BLOCK))
    maximum = (most.to(tl.int64) << 32) | ((block * BLOCK + first) ^ _TOKENS).to(tl.int64)
    tl.store(maxima_ptr + row * tl.num_programs(0) + block, maximum)
    if block == 0:
        word = tl.arange(0, ZEROS)
        zeros = tl.full([ZEROS], 0, tl.int64)
        tl.store(records_ptr + row * record_length + word, zeros, mask=word < record_length)


@triton.jit
def load_argmax(maxima_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row's blocks, with its token."""
    block = tl.arange(0, BLOCKS)
    lowest = tl.full([], -(2**63), tl.int64)
    return max_of(tl.load(maxima_ptr + row * blocks + block, mask=block < blocks, other=lowest))


@triton.jit
def most_likely(maximum):
    """Number of the most likely token; -1 if its logit is NaN or infinite."""
    token = (maximum & _TOKENS) ^ _TOKENS
    return tl.where(is_number(logit_of((maximum >> 32).to(tl.int32))), token, -1)


@triton.jit
def _argmax_kernel(maxima_ptr, tokens_ptr, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    maximum = load_argmax(maxima_ptr, row, blocks, BLOCKS)
    tl.store(tokens_ptr + row, most_likely(maximum))
