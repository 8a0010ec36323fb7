"""Sampling: a token of every row by its probability, in few launches and without a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from absorbed_mla.kernels.sampling.argmax import launch_block_argmax
from absorbed_mla.kernels.sampling.inverse_cdf import launch_inverse_cdf
from absorbed_mla.kernels.sampling.softmax_weights import launch_softmax_weights
from absorbed_mla.kernels.sampling.thresholds import launch_thresholds
from absorbed_mla.kernels.sampling.vocabulary_blocks import BLOCK, VocabularyBlocks


def draw_tokens(logits: Tensor, parameters: Tensor, *, filters: bool, block: int = BLOCK) -> Tensor:
    """The token that a row's parameters sample, by the rules of ``serving/sampling/draw.py``.

    A CUDA graph may hold it: nothing waits for the device, and no launch depends on values. With
    filters there are 3 launches and 8 for bf16, 12 for fp16, 16 for fp32.

    Args:
        logits: bf16, fp16 or fp32 [rows, vocabulary], last axis contiguous.
        parameters: float64 [6, rows] of any strides: temperature, random number, min_p, top_k,
            top_p, and whether the row is sampled; if not, it takes the most likely token.
        filters: Whether a row may have top_k below the vocabulary's size, or top_p below 1.
        block: Tokens of a program.

    Returns:
        int64 [rows]; -1 where the largest logit is NaN or infinite.
    """
    blocks = VocabularyBlocks.of(logits, block, filters=filters)
    tokens = torch.empty(blocks.rows, dtype=torch.int64, device=logits.device)
    # Triton launches on the current device, whatever the tensors' is.
    with torch.cuda.device_of(logits):
        launch_block_argmax(logits, blocks)
        launch_softmax_weights(logits, parameters, blocks, filters=filters)
        if filters:
            launch_thresholds(logits, parameters, blocks)
        launch_inverse_cdf(logits, parameters, blocks, tokens, filters=filters)
    return tokens
