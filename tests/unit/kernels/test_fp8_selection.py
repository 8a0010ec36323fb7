"""The choice of keys by scores in FP8: Triton's kernels against plain PyTorch, to the key."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.inference.rows import Rows
from absorbed_mla.registry import INDEXER_BACKENDS
from tests.support.backends import triton_interpreter

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, HEADS, TOPK = 32, 3, 12

with triton_interpreter():
    from absorbed_mla.kernels.dsa import cached_scores, index_scores, radix_select


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks, parts, tiles and groups of which the tests have several."""
    for name, value in {"_KEYS": 32, "_BLOCKS": 2, "_TOKENS": 4}.items():
        monkeypatch.setattr(cached_scores, name, value)
    monkeypatch.setattr(index_scores, "_TILE", (32, 32, 4, 1))
    monkeypatch.setattr(radix_select, "_GROUPS", 32)
    with triton_interpreter():
        yield


def numbers(*shape: int) -> torch.Tensor:
    """Whole numbers that e4m3 has to round, of rows of different size: their sums are exact."""
    make = torch.Generator().manual_seed(sum(shape))
    size = 2.0 ** torch.randint(0, 2, shape[:-1], generator=make)[..., None]
    found = torch.randint(-40, 41, shape, generator=make) * size
    return found.to(DEVICE, torch.bfloat16)


def weights(*shape: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randint(-2, 3, shape, generator=make).float().to(DEVICE)


def chosen_by(name: str, method: str, *operands, **more) -> torch.Tensor:
    return getattr(INDEXER_BACKENDS[name], method)(*operands, TOPK, **more)


@pytest.mark.no_cover
@pytest.mark.parametrize("relu", [True, False])
def test_training(relu):
    index = IndexVectors(numbers(22, 2, HEADS, WIDTH), numbers(70, 2, WIDTH), weights(22, 2, HEADS))
    spans = Spans([Span(0, 13, 0, 50, causal_offset=37), Span(13, 22, 50, 70, causal_offset=11)])
    operands = index, spans
    found, expected, unrounded = (
        chosen_by(name, "select", *operands, relu=relu, tp_group=None)
        for name in ("triton_fp8", "reference_fp8", "reference")
    )
    assert torch.equal(found, expected)
    assert not torch.equal(unrounded, expected)


@pytest.mark.no_cover
@pytest.mark.parametrize("new", [[1, 1, 1], [6, 1, 3]], ids=["decode", "prompts"])
def test_cached(new):
    lengths, block_size = [200, 90, 9], 8
    blocks = -(-max(lengths) // block_size)
    table = torch.randperm(3 * blocks).int().view(3, blocks).to(DEVICE)
    rows = Rows.of(new, lengths, table)
    operands = (
        numbers(sum(new), HEADS, WIDTH),
        weights(sum(new), HEADS),
        numbers(3 * blocks, block_size, WIDTH),
        rows,
    )
    found, expected, unrounded = (
        chosen_by(name, "select_cached", *operands, relu=True)
        for name in ("triton_fp8", "reference_fp8", "reference")
    )
    assert torch.equal(found, expected)
    assert not torch.equal(unrounded, expected)
