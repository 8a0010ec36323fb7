"""Relative errors of tensors, and their bounds.

The error of a tensor is |actual - expected| / |expected| in the Frobenius norm; the bound at a
lower precision is three times the error of the oracle's equations computed in plain PyTorch at that
precision: the module rounds at other places (absorbed query, partial sums), not much more often.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support import world

EAGER_FACTOR = 3.0


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(world.device(), dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; absolute where ``expected`` is zero, infinite where not finite."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    difference = torch.linalg.vector_norm(actual.double().cpu() - expected.double().cpu()).item()
    size = torch.linalg.vector_norm(expected.double()).item()
    return difference / size if size else difference


def check_gradients(function: Callable, exact: Callable, leaves: list, bound: float) -> Tensor:
    """Errors of a function's value and gradients, of what ``exact`` makes in fp64; the value."""
    doubles = [x.double().requires_grad_() for x in leaves]
    found, expected = function(*(x.requires_grad_() for x in leaves)), exact(*doubles)
    grad = random(*found.shape, dtype=found.dtype, seed=3)
    gradients = torch.autograd.grad(found, leaves, grad)
    truth = torch.autograd.grad(expected, doubles, grad.double())
    for actual, wanted in zip((found, *gradients), (expected, *truth), strict=True):
        assert actual.dtype == found.dtype
        error = relative_error(actual.detach(), wanted.detach())
        assert error < bound, f"{error:.1e} of {tuple(actual.shape)}"
    return found


def rounding_floor(dtype: torch.dtype) -> float:
    """Two roundings of the result, an error that every evaluation at ``dtype`` may have."""
    return 2 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Deviation:
    """Relative errors of named tensors and the bounds they must stay below."""

    errors: dict[str, float]
    bounds: dict[str, float]

    def worst(self) -> tuple[str, float]:
        """Name and error of the tensor closest to, or furthest beyond, its bound."""
        name = max(self.errors, key=lambda n: self.errors[n] / self.bounds[n])
        return name, self.errors[name]

    def check(self, what: str = "") -> None:
        """Fail with every tensor that is out of bounds, worst first."""
        bad = [n for n in self.errors if not self.errors[n] <= self.bounds[n]]
        bad.sort(key=lambda n: self.errors[n] / self.bounds[n], reverse=True)
        lines = [f"  {n}: {self.errors[n]:.2e} > {self.bounds[n]:.2e}" for n in bad]
        if lines:
            raise AssertionError("\n".join([f"relative errors out of bounds {what}:", *lines]))


def compare(
    actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float | dict[str, float]
) -> Deviation:
    """Compare tensors by name; both sides must name the same ones."""
    if set(actual) != set(expected):
        raise AssertionError(f"tensors differ by name: {sorted(set(actual) ^ set(expected))}")
    bounds = bound if isinstance(bound, dict) else dict.fromkeys(expected, bound)
    return Deviation({n: relative_error(actual[n], expected[n]) for n in expected}, bounds)


def bounds_from_eager(
    eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Bound of each tensor: three times the error of ``eager``, plus :func:`rounding_floor`."""
    floor = rounding_floor(dtype)
    return {n: EAGER_FACTOR * relative_error(eager[n], exact[n]) + floor for n in exact}
