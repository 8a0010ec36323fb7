"""The ReLU of an indexer's products."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def positive(values):
    """Values where they are positive, else 0; NaN stays NaN, which the interpreter does not test.

    One instruction for an element, and to compare and select are two.
    """
    return tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
