"""The search for the largest scores by the LSE, as a kernel and in PyTorch, beside float64.

Without a GPU the kernel runs in Triton's interpreter.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention import max_logits_search as search
from absorbed_mla.core_attention.backends.reference import reference_forward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.masks.tiles import query_tiles
from absorbed_mla.core_attention.max_logits import MaxLogits
from absorbed_mla.core_attention.types import AttentionInputs
from tests.support import world
from tests.support.backends import triton_interpreter
from tests.support.hostile import amid_nan

pytest.importorskip("triton")
# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels import max_logits as kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALE, HEADS, BATCH = 0.3, 4, 2


@dataclass(frozen=True)
class Case:
    """Queries and keys, each head's scores of another size."""

    queries: int
    keys: int
    spans: tuple[Span, ...]
    width: int = 40
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        shapes = [(length, BATCH, HEADS, self.width) for length in (self.queries, self.keys)]
        q, k = (torch.randn(shape, generator=generator) for shape in shapes)
        q *= torch.tensor([0.05, 0.5, 1.0, 4.0])[:, None]
        return q.to(world.device(), self.dtype), k.to(world.device(), self.dtype)

    def exact(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Largest score of each head, and the LSE, in fp64."""
        found = MaxLogits(torch.full((HEADS,), -torch.inf, dtype=torch.float64, device=q.device))
        rules = ScoreRules(SCALE, Spans(self.spans), max_logits=found)
        inputs = AttentionInputs.multi_head(q.double(), k.double(), k.double())
        return found.of_heads, reference_forward(inputs, rules).lse


CASES = {
    "causal": Case(150, 150, (Span(0, 150, 0, 150, 0),)),
    "padding": Case(37, 37, (Span(0, 1, 0, 1, 0), Span(3, 20, 3, 20, 0), Span(24, 37, 24, 37, 0))),
    "zigzag": Case(30, 175, (Span(0, 9, 0, 9, 0), Span(9, 30, 0, 175, 154)), width=24, dtype=FP16),
    "all_keys": Case(5, 140, (Span(0, 5, 0, 140, None),), width=16, dtype=FP32),
    "first_queries_see_nothing": Case(20, 33, (Span(2, 20, 1, 33, -5),), width=64),
    "nobody_sees_anything": Case(7, 9, (Span(1, 6, 0, 9, -8),)),
    "width_192": Case(20, 20, (Span(0, 20, 0, 20, 0),), width=192),
}
if world.device().type == "cuda":
    LONG = (Span(0, 1, 0, 1, 0), Span(5, 700, 5, 700, 0), Span(703, 2500, 703, 2500, 0))
    CASES["long"] = Case(2501, 2501, LONG, width=192)
    CASES["width_256"] = Case(600, 600, (Span(0, 600, 0, 600, 0),), width=256)


def by_kernel(q, k, lse, of_heads, spans, threshold):
    tiles = query_tiles(spans, kernels.QUERIES).to(q.device)
    kernels.largest_scores(q, k, lse, of_heads, tiles, SCALE, threshold)


def by_pytorch(q, k, lse, of_heads, spans, threshold):
    rules = ScoreRules(SCALE, Spans(spans), query_chunk_size=7)
    search._search(q, k, lse, of_heads, rules, threshold)


BOTH = pytest.mark.parametrize("way", [by_kernel, by_pytorch])


def filled(value: float = -torch.inf) -> Tensor:
    return torch.full((HEADS,), value, device=world.device())


def as_kernels_write_it(lse: Tensor, spans) -> Tensor:
    """fp32, [B, N, S] in memory, anything for queries in no span."""
    inside = torch.zeros(len(lse), dtype=torch.bool, device=lse.device)
    for span in spans:
        inside[span.queries] = True
    garbage = torch.where(inside[:, None, None], lse, 1e9).float()
    return garbage.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def search_for(way, case: Case, q: Tensor, k: Tensor, threshold=-torch.inf, found=None) -> tuple:
    """What the way finds, or raises ``found`` to, and the largest scores in float64."""
    expected, lse = case.exact(q, k)
    found = filled() if found is None else found
    way(q, k, as_kernels_write_it(lse, case.spans), found, case.spans, threshold)
    return found.double(), expected


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(way, name):
    """Of each head, over the pairs that see each other and no others."""

    def amid(q, k, *rest):
        way(amid_nan(q), amid_nan(k), *rest)

    assert_close(*search_for(amid, CASES[name], *CASES[name].tensors()))


@BOTH
def test_no_score_is_positive(way):
    """Rows that fill a tile up score 0 with everything."""
    q, k = CASES["causal"].tensors()
    found, expected = search_for(way, CASES["causal"], q.abs(), -k.abs())
    assert (expected < 0).all()
    assert_close(found, expected)


@BOTH
def test_threshold(way):
    """Exact above it; below it an upper bound that does not reach it."""
    case = CASES["causal"]
    q, k = case.tensors()
    largest, lse = case.exact(q, k)
    threshold = float(largest[2]) * 0.999
    # The others' LSE is below it, too.
    assert (lse[..., :2].amax((0, 1)) < threshold).all()
    found, expected = search_for(way, case, q, k, threshold)
    assert_close(found[2:], expected[2:])
    assert (found[:2] >= expected[:2]).all() and (found[:2] < threshold).all()


@BOTH
def test_earlier_forwards_count(way):
    """What micro-batches before have found stays, where it is larger."""
    case = CASES["zigzag"]
    q, k = case.tensors()
    before = float(case.exact(q, k)[0][2]) + 0.5
    found, expected = search_for(way, case, q, k, found=filled(before))
    assert torch.equal(found[:3], filled(before).double()[:3])
    assert_close(found[3], expected[3])


def test_tiles_that_cannot_matter_are_left_out():
    """With keys that are larger than the LSE says: a tile that is computed shows it."""
    case = CASES["causal"]
    q, k = case.tensors()
    lse = as_kernels_write_it(case.exact(q, k)[1], case.spans)
    found = lse.amax((0, 1)) + 0.1
    before = found.clone()
    by_kernel(q, 9 * k, lse, found, case.spans, -torch.inf)
    assert torch.equal(found, before)
    # The same LSE reaches what was found now.
    found -= 0.1
    by_kernel(q, 9 * k, lse, found, case.spans, -torch.inf)
    assert (found[1:] > before[1:]).all()


def test_every_tile_has_a_program(monkeypatch):
    """Four tiles in groups of three; each has the largest score of a head in turn."""
    monkeypatch.setattr(kernels, "QUERIES", 16)
    monkeypatch.setattr(kernels, "_TOGETHER", 3)
    case = Case(50, 50, (Span(0, 50, 0, 50, 0),), width=16)
    q, k = case.tensors()
    for first in range(0, case.queries, 16):
        large = q.clone()
        large[first : first + 16] *= 6
        assert_close(*search_for(by_kernel, case, large, k))


def test_part_of_the_heads():
    """As the expanded form calls it, for a chunk of heads."""
    case = replace(CASES["zigzag"], queries=9, spans=(Span(0, 9, 0, 9, 0),))
    q, k = case.tensors()
    expected, lse = case.exact(q, k)
    whole = torch.full((HEADS + 3,), -torch.inf, device=q.device)
    rules = ScoreRules(SCALE, Spans(case.spans), max_logits=MaxLogits(whole), first_head=2)
    search.record_by_search(q, k, as_kernels_write_it(lse, case.spans), rules)
    assert_close(whole[2:6].double(), expected)
    assert (whole[[0, 1, 6]] == -torch.inf).all()
