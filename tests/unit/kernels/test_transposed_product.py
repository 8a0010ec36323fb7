"""Products over rows miss none, also where cuBLAS leaves the last of 64 n + 1 out."""

import itertools
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch

from absorbed_mla import absorb
from absorbed_mla.kernels import transposed_product as module
from tests.support import needs, world

# Where cuBLAS 13.1 was wrong on an H100, and beside.
ROWS = [1, 2, 65, 3712, 3713, 4097, 5633, 8193]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if world.device().type == "cuda" else torch.float32
    return torch.randn(*shape, generator=generator).to(world.device(), dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("left", "right"), [(16, 512), (128, 544), (512, 512)])
def test_transposed_product(rows, left, right):
    a, b = random(rows, left), random(rows, right, seed=1)
    found = module.transposed_product(a, b)
    assert found.dtype == torch.float32
    # A row that is missing makes a hundredth.
    assert_near(found, a.double().t() @ b.double(), 1e-4)


def test_last_row_apart(monkeypatch):
    monkeypatch.setattr(module, "may_lose_last_row", lambda x, rows: rows > 1)
    a, b = random(65, 3), random(65, 4, seed=1)
    assert_near(module.transposed_product(a, b), a.double().t() @ b.double(), 1e-4)


@pytest.mark.parametrize("shape", [(3713, 1), (8193, 1), (1, 65), (1639, 5)])
@pytest.mark.parametrize("heads", [2, 16])
def test_gradients_of_head_weights(shape, heads):
    _compare(random(*shape, heads, 32), random(heads, 32, 48, seed=1))


def test_head_products_with_last_row_apart():
    product = partial(absorb._last_row_apart, "sbnd,ndc->sbnc")
    _compare(random(9, 3, 2, 8), random(2, 8, 5, seed=1), product)


def _compare(
    x: torch.Tensor, weight: torch.Tensor, product: Callable = absorb.absorb_query
) -> None:
    for tensor in (x, weight):
        tensor.requires_grad_()
    found = product(x, weight)
    grad = random(*found.shape, seed=2)
    grads = torch.autograd.grad(found, (x, weight), grad)
    wide = x.double().detach().requires_grad_(), weight.double().detach().requires_grad_()
    expected = torch.einsum("sbnd,ndc->sbnc", *wide)
    for actual, wanted in zip(
        (found, *grads), (expected, *torch.autograd.grad(expected, wide, grad.double()))
    ):
        # 2e-3 is what rounding to bf16 makes.
        assert_near(actual, wanted, 5e-3 if actual.dtype == torch.bfloat16 else 1e-5)


def test_warned_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "may_lose_last_row", lambda x, rows: rows % 64 == 1)
    counts = itertools.count()
    monkeypatch.setattr(module, "times_logged", lambda *_: counts)
    with caplog.at_level(logging.WARNING):
        with torch.no_grad():
            module.warn_of_lost_rows(torch.zeros(193, 1, 4))
        for tokens in (64, 65, 129):
            module.warn_of_lost_rows(torch.zeros(tokens, 1, 4))
    [record] = caplog.records
    assert "the last of 65 tokens" in record.message


@needs.gpu
@pytest.mark.parametrize(
    ("dtype", "rows", "lost"),
    [(torch.bfloat16, 65, True), (torch.float16, 129, True), (torch.float32, 65, False)]
    + [(torch.bfloat16, rows, False) for rows in (1, 64, 66)],
)
def test_which_rows_may_be_lost(dtype, rows, lost):
    x = torch.zeros(1, dtype=dtype, device="cuda")
    assert module.may_lose_last_row(x, rows) == lost
