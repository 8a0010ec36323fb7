"""Rows in e4m3 with a power of two as their scale."""

import torch

from absorbed_mla.dsa.fp8_rows import E4M3, LEAST, rounded_to_fp8, to_fp8


def test_rounding():
    """The largest number uses the range, and no row loses more than e4m3's last bit."""
    rows = torch.randn(400, 64) * torch.logspace(-4, 6, 400)[:, None]
    values, scales = to_fp8(rows)
    assert values.dtype is E4M3 and scales.dtype is torch.float32
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = values.float().abs().amax(-1)
    assert largest.min() >= 224 and largest.max() <= 448
    # Half of the last of three bits, or of the least number.
    bound = torch.maximum(rows.abs() * 2**-4, scales[:, None] * 2**-10)
    assert bool(((rounded_to_fp8(rows) - rows).abs() <= bound).all())


def test_borders():
    """448 times a power of two still has that scale; what is a little larger has the next one."""
    for exponent in (-4, 0, 3):
        largest = torch.tensor(448.0 * 2.0**exponent)
        above = torch.nextafter(largest, torch.tensor(torch.inf))
        scales = to_fp8(torch.stack((largest, above))[:, None]).scales
        assert scales.tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


def test_small_and_undefined_numbers():
    assert torch.equal(rounded_to_fp8(torch.zeros(2, 4)), torch.zeros(2, 4))
    assert (
        to_fp8(torch.full((1, 4), LEAST / 100)).scales == to_fp8(torch.full((1, 4), LEAST)).scales
    )
    rows = torch.tensor([[1.0, torch.nan], [1.0, 2.0]])
    assert rounded_to_fp8(rows).isnan().any(-1).tolist() == [True, False]


def test_dtypes():
    """Rows that e4m3 has keep every bit, in the dtype of the computation."""
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        rows = torch.tensor([[1.0, -1.125, 0.25, 448.0]], dtype=dtype)
        found = rounded_to_fp8(rows)
        assert found.dtype is expected and torch.equal(found, rows.to(expected))
