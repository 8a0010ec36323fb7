"""What an indexer learns, by the kernels and by plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.dsa.sparse_reference import (
    latent_inputs,
    masked_scores,
    probabilities,
    sparse_forward,
)
from absorbed_mla.dsa.support import ChosenKeys, VisibleKeys
from tests.support.backends import triton_interpreter
from tests.support.hostile import poisoned_memory
from tests.support.numerics import relative_error

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE, QUERIES, KEYS, BATCH = 0.2, 6, 70, 2

with triton_interpreter():
    from absorbed_mla.kernels.dsa.target import chosen_target, visible_target


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield


def operands(heads, rope, dtype):
    make = torch.Generator().manual_seed(0)
    shapes = (QUERIES, BATCH, heads, 32), (QUERIES, BATCH, heads, rope), (KEYS, BATCH, 32 + rope)
    return [torch.randn(s, generator=make).to(DEVICE, dtype) for s in shapes]


def expected(tensors, support, lse):
    query = torch.cat(tensors[:2], -1).double()[support.queries]
    scores = masked_scores(query, support.take(tensors[2].double()), support, SCALE)
    return probabilities(scores, lse[support.queries].permute(1, 2, 0).double()).sum(1)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("heads", "rope", "dtype"),
    [(3, 16, torch.bfloat16), (80, 16, torch.bfloat16), (4, 0, torch.float32)],
    ids=str,
)
class TestTarget:
    def test_visible(self, heads, rope, dtype):
        tensors = operands(heads, rope, dtype)
        span = Span(1, 5, 3, 69, 60)
        support = VisibleKeys(span, DEVICE, heads)
        lse = torch.randn(QUERIES, BATCH, heads, device=DEVICE) + 3
        inputs = latent_inputs(*tensors)
        four = (*inputs[:2], inputs.k_content.squeeze(2), inputs.k_rope)
        with poisoned_memory():
            found = visible_target(four, lse, support.queries, 3, 66, 60, SCALE)
        assert relative_error(found.double(), expected(tensors, support, lse)) < 1e-5

    def test_chosen(self, heads, rope, dtype):
        """A query without keys has an LSE of -inf."""
        tensors = operands(heads, rope, dtype)
        chosen = torch.rand(QUERIES, BATCH, KEYS).topk(67).indices.sort().values.int().to(DEVICE)
        chosen[0] = -1
        chosen[3, :, 5:9] = -1
        inputs = latent_inputs(*tensors)
        lse = sparse_forward(inputs, chosen, SCALE).lse
        four = (*inputs[:2], inputs.k_content.squeeze(2), inputs.k_rope)
        with poisoned_memory():
            found = chosen_target(four, lse, chosen, SCALE)
        truth = expected(tensors, ChosenKeys(slice(0, QUERIES), chosen, heads), lse)
        assert relative_error(found.double(), truth) < 1e-5
        total = found.sum(-1).T
        assert torch.allclose(total[1:], torch.full_like(total[1:], heads), rtol=1e-3)
