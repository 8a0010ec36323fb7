"""The most likely token of every row: the first one with the largest logit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from absorbed_mla.kernels.launch import launch
from absorbed_mla.kernels.sampling.vocabulary_blocks import PIECE, WARPS, Pieces
from absorbed_mla.kernels.sampling.weights import (
    NOTHING,
    is_number,
    largest,
    load_piece,
    logit_of,
    ordered,
)

# Bits of a token's number.
_TOKENS = tl.constexpr(0x7FFFFFFF)


def find_most_likely(logits: Tensor, piece: int = PIECE) -> Tensor:
    """The most likely token of each row, that of ``argmax``; -1 if the largest logit is no number.

    Args:
        logits: bf16, fp16 or fp32 [rows, vocabulary], last axis contiguous.
        piece: Tokens of a program.

    Returns:
        int64 [rows].
    """
    pieces = Pieces.of(logits, piece)
    tokens = torch.empty(pieces.rows, dtype=torch.int64, device=logits.device)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(logits):
        launch_peaks(logits, pieces)
        launch(
            _most_likely_kernel,
            (pieces.rows,),
            pieces.peaks,
            tokens,
            pieces.count,
            PIECES=pieces.width,
            num_warps=1,
        )
    return tokens


def launch_peaks(logits: Tensor, pieces: Pieces) -> None:
    """Writes ``peaks``, and zeros to ``records``."""
    length = pieces.records.shape[0] // pieces.rows
    launch(
        _peaks_kernel,
        (pieces.count, pieces.rows),
        logits,
        pieces.peaks,
        pieces.records,
        logits.stride(0),
        pieces.vocabulary,
        length,
        PIECE=pieces.size,
        ZEROS=1 << (length - 1).bit_length(),
        num_warps=WARPS,
    )


@triton.jit
def _peaks_kernel(
    logits_ptr,
    peaks_ptr,
    records_ptr,
    stride_l,
    vocabulary,
    record_length,
    PIECE: tl.constexpr,
    ZEROS: tl.constexpr,
):
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logits, inside = load_piece(logits_ptr + row * stride_l, piece, vocabulary, PIECE)
    bits = tl.where(inside, ordered(logits), NOTHING)
    most = largest(bits)
    place = tl.arange(0, PIECE)
    first = -largest(tl.where(bits == most, -place, -PIECE))
    peak = (most.to(tl.int64) << 32) | ((piece * PIECE + first) ^ _TOKENS).to(tl.int64)
    tl.store(peaks_ptr + row * tl.num_programs(0) + piece, peak)
    if piece == 0:
        word = tl.arange(0, ZEROS)
        zeros = tl.full([ZEROS], 0, tl.int64)
        tl.store(records_ptr + row * record_length + word, zeros, mask=word < record_length)


@triton.jit
def load_peak(peaks_ptr, row, pieces, PIECES: tl.constexpr):
    """Of a row, with its token."""
    piece = tl.arange(0, PIECES)
    lowest = tl.full([], -(2**63), tl.int64)
    return largest(tl.load(peaks_ptr + row * pieces + piece, mask=piece < pieces, other=lowest))


@triton.jit
def most_likely(peak):
    """Number of the most likely token; -1 if its logit is NaN or infinite."""
    token = (peak & _TOKENS) ^ _TOKENS
    return tl.where(is_number(logit_of((peak >> 32).to(tl.int32))), token, -1)


@triton.jit
def _most_likely_kernel(peaks_ptr, tokens_ptr, pieces, PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = load_peak(peaks_ptr, row, pieces, PIECES)
    tl.store(tokens_ptr + row, most_likely(peak))
