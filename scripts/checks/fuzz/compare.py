"""Comparisons of a kernel's results with fp64, and the tolerances.

Rounding rule of :meth:`Comparison.rows`: a reference says, beside every expected number, which
``noise`` the same equations have if each intermediate result is rounded once to a relative error of
1, all errors independent: the root of the sum of the squares of the summands. Times the ``eps`` of
the dtype that is what the equations lose in that dtype. Each row (the last axis) may differ by
``FACTORS`` times that, in the Euclidean norm; roundings to nearest make about a third of an
``eps``. fp32 has a larger factor: there scores and sums are no more exact than what is rounded.

Discrete results (experts, keys, tokens) are compared one by one. Another choice than the
reference's is right only where what it was chosen by differs by no more than rounding: each family
says so where it compares them.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of the noise of a row, by the dtype whose eps it is multiplied by.
FACTORS = {torch.bfloat16: 3.0, torch.float16: 3.0, torch.float32: 100.0}
# Of fp16 near 0.
_SPACING = 2.0**-24
# Of the LSE and of scores by which it is computed, absolute: 16-bit operands, and fp32.
_LSE = {torch.bfloat16: 2e-3, torch.float16: 2e-3, torch.float32: 1e-4}


class Mismatch(AssertionError):
    """A kernel's result is not what PyTorch computes in fp64."""


class Comparison:
    """Compares the results of one case, and keeps the largest share of a tolerance that was used.

    Attributes:
        worst: Largest error, as a share of what is allowed.
        compared: How many results were compared.
    """

    def __init__(self) -> None:
        self.worst, self.compared = 0.0, 0

    def rows(
        self, name: str, actual: Tensor, expected: Tensor, noise: Tensor, dtype: torch.dtype
    ) -> None:
        """Rows as near to fp64 as the rounding rule says.

        Args:
            name: Of the result.
            actual: What the kernel wrote.
            expected: fp64, in the same shape; infinite and NaN numbers must be the same.
            noise: In the same shape, see the module.
            dtype: Whose ``eps`` the noise is multiplied by.
        """
        self._count(name, actual, expected)
        if not actual.numel():
            return
        finite = self._same_specials(name, actual, expected)
        error = torch.where(finite, actual.double() - expected, 0.0)
        bound = FACTORS[dtype] * torch.finfo(dtype).eps * torch.where(finite, noise.double(), 0.0)
        if dtype == torch.float16:
            bound += torch.where(bound > 0, _SPACING, 0.0)
        self._judge(name, _norm(error), _norm(bound), actual, expected)

    def near(self, name: str, actual: Tensor, expected: Tensor, tolerance: Tensor | float) -> None:
        """Each number within an absolute tolerance of fp64."""
        self._count(name, actual, expected)
        if not actual.numel():
            return
        finite = self._same_specials(name, actual, expected)
        error = torch.where(finite, (actual.double() - expected).abs(), 0.0)
        bound = torch.zeros_like(error) + tolerance
        self._judge(name, error, bound, actual, expected)

    def lse(self, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
        """Logarithms of sums of exponentials of scores, from operands of this dtype."""
        size = expected.abs().nan_to_num(0.0, 0.0, 0.0)
        self.near("lse", actual, expected, _LSE[dtype] + 1e-5 * size)

    def same(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """The same numbers, bit by bit but for the sign of 0 and the bits of NaN."""
        self._count(name, actual, expected)
        different = (actual != expected) & ~((actual != actual) & (expected != expected))
        self._refuse(name, different, actual, expected, "must be equal")

    def holds(self, name: str, wrong: Tensor, actual: Tensor, expected: Tensor) -> None:
        """Nothing is wrong; the rest is for the message.

        Args:
            name: Of the result.
            wrong: bool, which numbers, or which rows, are.
            actual: What the kernel wrote.
            expected: One of the right answers.
        """
        self.compared += 1
        self._refuse(name, wrong, actual, expected, "is no answer")

    def _count(self, name: str, actual: Tensor, expected: Tensor) -> None:
        self.compared += 1
        if actual.shape != expected.shape:
            shapes = f"{tuple(actual.shape)}, expected {tuple(expected.shape)}"
            raise Mismatch(f"{name} has the shape {shapes}")

    def _same_specials(self, name: str, actual: Tensor, expected: Tensor) -> Tensor:
        """Refuses infinite numbers and NaN that are not expected; returns where there is none."""
        finite = torch.isfinite(expected)
        wrong = torch.isfinite(actual) != finite
        special = ~finite & ~((actual == expected) | ((actual != actual) & (expected != expected)))
        self._refuse(name, wrong | special, actual, expected, "is infinite or NaN, or should be")
        return finite

    def _judge(
        self, name: str, error: Tensor, bound: Tensor, actual: Tensor, expected: Tensor
    ) -> None:
        wrong = ~(error <= bound)
        share = torch.where(error > 0, error / bound, 0.0).amax().item()
        if wrong.any():
            worst = torch.where(wrong, error / bound, -1.0).flatten().argmax()
            place = _place(worst, error.shape)
            text = f"{name}[{place}] is off by {error.flatten()[worst]:.3g}"
            text += f", allowed {bound.flatten()[worst]:.3g}"
            raise Mismatch(f"{text}; {int(wrong.sum())} of {wrong.numel()} are too far off")
        self.worst = max(self.worst, share)

    def _refuse(self, name: str, wrong: Tensor, actual: Tensor, expected: Tensor, why: str) -> None:
        if not wrong.any():
            return
        place = wrong.flatten().to(torch.int8).argmax()
        at = _place(place, wrong.shape)
        index = tuple(map(int, at.split(", "))) if at else ()
        found, wanted = actual[index].flatten()[:8].tolist(), expected[index].flatten()[:8].tolist()
        count = f"{int(wrong.sum())} of {wrong.numel()}"
        raise Mismatch(f"{name}[{at}] {why}: got {found}, expected {wanted}; wrong: {count}")


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1) if x.dim() else x.abs()


def _place(flat: Tensor, shape: torch.Size) -> str:
    return ", ".join(str(int(i)) for i in torch.unravel_index(flat, shape)) if shape else ""
