"""Converted checkpoints under tensor parallelism: the logits of transformers, whatever the size.

Rank 0 makes a model of transformers, converts it, and computes what it predicts. All ranks load the
distributed checkpoint with Megatron's loader and evaluate it together.
"""

from __future__ import annotations

from tests.conversion.converted import converted, loaded_logits
from tests.conversion.models import ARCHITECTURES
from tests.support import needs
from tests.support.combinations import grid, two_ranks

# With one rank: tests/conversion/test_logits.py.
pytestmark = [two_ranks, needs.no_gpu]

# Of the largest logit; float32 sums in another order stay 10 times below.
TOLERANCE = 1e-4


@grid(
    1,
    {
        "architecture": {a.name.replace(" ", "-"): a for a in ARCHITECTURES},
        "to": ("absorbed", "megatron"),
    },
)
def test_logits_of_transformers(architecture, to):
    with converted(architecture, to) as (folder, tokens, expected):
        logits = loaded_logits(folder, tokens)
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()
