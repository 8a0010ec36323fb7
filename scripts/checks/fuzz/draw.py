"""Random numbers of a case, the same whenever the case is repeated on a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_T = TypeVar("_T")


class Draw:
    """Draws sizes, values and tensors.

    Args:
        device: Of the tensors. Sizes are small where it is a CPU, whose kernels are interpreted.
        seed: What the numbers follow from.
    """

    OWN = ("device", "random", "generator")

    def __init__(self, device: torch.device, *seed: object) -> None:
        self.device = device
        self.random = random.Random("/".join(map(str, seed)))
        self.generator = torch.Generator(device).manual_seed(self.random.getrandbits(62))

    def limit(self, gpu: int, interpreted: int) -> int:
        """The largest size: on a GPU, or in the interpreter."""
        return gpu if self.device.type == "cuda" else interpreted

    def choice(self, *values: _T) -> _T:
        """One of the values."""
        return self.random.choice(values)

    def often(self, *values: _T) -> _T:
        """One of the values; the first one in half of all draws."""
        return values[0] if self.flag() else self.random.choice(values)

    def integer(self, least: int, most: int) -> int:
        """Least and most included."""
        return self.random.randint(least, most)

    def flag(self, share: float = 0.5) -> bool:
        """True in this share of all draws."""
        return self.random.random() < share

    def length(self, most: int, *tiles: int, least: int = 0) -> int:
        """A length up to ``most``: 0, 1, around a multiple of a tile, small, or any."""
        tile = self.random.choice(tiles or (16,))
        kind = self.integer(0, 5)
        if kind == 0:
            found = self.integer(0, 2)
        elif kind in (1, 2):
            found = tile * self.integer(1, max(1, min(most // tile, 4))) + self.integer(-1, 1)
        elif kind == 3:
            found = self.integer(0, min(2 * tile, most))
        else:
            found = self.integer(0, most)
        return max(least, min(found, most))

    def lengths(self, number: int, most: int, *tiles: int, least: int = 0) -> list[int]:
        """So many lengths that add up to ``most`` at most, unless ``least`` asks for more."""
        found, left = [], most
        for _ in range(number):
            found.append(self.length(max(left, least), *tiles, least=least))
            left = max(left - found[-1], 0)
        self.random.shuffle(found)
        return found

    def sample(self, values: Sequence[_T], number: int) -> list[_T]:
        """So many of the values, none twice, in any order."""
        return self.random.sample(values, number)

    def normal(self, *shape: int, dtype: torch.dtype = FP32, magnitude: float = 1.0) -> Tensor:
        """Normally distributed values."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return (values * magnitude).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """fp64 values from 0 to below 1."""
        options = {"dtype": torch.float64, "device": self.device}
        return torch.rand(shape, generator=self.generator, **options)

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from 0 to below ``end``."""
        options = {"dtype": dtype, "device": self.device}
        return torch.randint(end, shape, generator=self.generator, **options)

    def amid_nan(self, x: Tensor, *, last: int = 1) -> Tensor:
        """In half of all draws ``x`` itself, else a view with its values in a buffer of NaN.

        ``last`` is the stride of the view's last axis.
        """
        if self.flag() and last == 1:
            return x
        around = [n + 1 for n in x.shape[:-1]] + [x.shape[-1] * last + 16]
        buffer = x.new_full(around, torch.nan)
        view = buffer[tuple(slice(0, n) for n in x.shape[:-1])]
        view = view[..., 8 : 8 + x.shape[-1] * last : last]
        return view.copy_(x)

    def integer_tensor(self, values: Sequence, dtype: torch.dtype = torch.int32) -> Tensor:
        """The values on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)
