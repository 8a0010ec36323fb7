"""Draws a token of every row by its probability, in few launches and without a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.sampling.argmax import launch_peaks
from absorbed_mla.kernels.sampling.inverse_cdf import launch_place
from absorbed_mla.kernels.sampling.softmax_weights import launch_weighing
from absorbed_mla.kernels.sampling.thresholds import launch_thresholds
from absorbed_mla.kernels.sampling.vocabulary_blocks import PIECE, Pieces


def draw_tokens(logits: Tensor, numbers: Tensor, *, filters: bool, piece: int = PIECE) -> Tensor:
    """The token of each row that its numbers draw, by ``generation.drawing``'s rules.

    A CUDA graph may hold it: nothing waits for the device, and no launch depends on values. With
    filters there are 3 launches and 8 for bf16, 12 for fp16, 16 for fp32.

    Args:
        logits: bf16, fp16 or fp32 [rows, vocabulary], last axis contiguous.
        numbers: float64 [6, rows] of any strides: temperature, random number, min_p, top_k, top_p,
            and whether the row is sampled; if not, it takes the most likely token.
        filters: Whether a row may have top_k below the vocabulary's size, or top_p below 1.
        piece: Tokens of a program.

    Returns:
        int64 [rows]; -1 where the largest logit is NaN or infinite.
    """
    pieces = Pieces.of(logits, piece, filters=filters)
    tokens = torch.empty(pieces.rows, dtype=torch.int64, device=logits.device)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(logits):
        launch_peaks(logits, pieces)
        launch_weighing(logits, numbers, pieces, filters=filters)
        if filters:
            launch_thresholds(logits, numbers, pieces)
        launch_place(logits, numbers, pieces, tokens, filters=filters)
    return tokens
