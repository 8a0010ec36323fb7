"""Kernels of grouped experts against PyTorch in float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from absorbed_mla.experts.rows import ExpertRows
from tests.support.backends import triton_interpreter

# Triton decides when a kernel is decorated.
with triton_interpreter():
    from absorbed_mla.kernels.experts.few_rows import few_rows_product
    from absorbed_mla.kernels.experts.sums import summed
    from absorbed_mla.kernels.experts.swiglu import swiglu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUNDS = {torch.bfloat16: 2**-8, torch.float32: 1e-6}
dtypes = pytest.mark.parametrize("dtype", BOUNDS)
# The rows behind the last one of each expert: of 4 experts, some without rows, and of other ranks.
ENDS = {"some": [0, 7, 7, 40], "many": [33, 34, 36, 40], "others": [1, 2, 3, 20], "none": [0] * 4}
ends_of = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def table(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@dtypes
@ends_of
@pytest.mark.parametrize("width", [96, 40])
def test_swiglu(dtype, ends, width):
    x, probs = random(40, 2 * width, dtype=dtype), random(40).abs()
    x[ends[-1] :] = torch.nan
    gate, up = x.double().chunk(2, -1)
    expected = F.silu(gate) * up * probs.double()[:, None]
    found = swiglu(x, probs, table(ends))
    assert error(found[: ends[-1]], expected[: ends[-1]]) < BOUNDS[dtype]


@dtypes
@pytest.mark.parametrize("first", [None, 2])
def test_sums(dtype, first):
    """Also where experts of other ranks were chosen: their rows hold anything."""
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(11)]).to(DEVICE)
    rows = ExpertRows.of(chosen, 8 if first is None else 4, first)
    x = random(33, 72, dtype=dtype)
    x[int(rows.ends[-1]) :] = torch.nan
    expected = x.double().nan_to_num()[rows.places].sum(1)
    assert error(summed(x, rows.places, rows.ends), expected) < BOUNDS[dtype]


@dtypes
@ends_of
@pytest.mark.parametrize(("columns", "summands"), [(128, 256), (72, 136)])
def test_few_rows(dtype, ends, columns, summands):
    rows = random(40, summands, dtype=dtype)
    weights = random(4, columns, summands, dtype=dtype)
    found = few_rows_product(rows, weights, table(ends))
    for weight, begin, end in zip(weights, [0, *ends], ends):
        expected = rows[begin:end].double() @ weight.double().T
        assert error(found[begin:end], expected) < BOUNDS[dtype]
