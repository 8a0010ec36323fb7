"""Rows of a latent cache in FP8, which take 656 bytes where bf16 takes 1152.

The row is the one that DeepSeek's FlashMLA and vLLM call ``fp8_ds_mla``
(https://github.com/deepseek-ai/FlashMLA, its README):

    C e4m3 values | a fp32 scale for each 128 of them | R values of k_rope in bf16

and unused bytes up to a multiple of 16, of which there are none at DeepSeek-V3's widths. A scale is
the largest magnitude of its values over 448, the largest number of e4m3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# Values that share a scale.
GROUP = 128
# Groups of smaller numbers have the scale of this one, so that scales are normal numbers.
LEAST = 2.0**-100
RECIPROCAL_OF_LARGEST = 1 / 448
# Rows begin where the widest load may.
_ALIGNMENT = 16
# C must be a multiple of the bytes of a scale, which lie behind the values.
_SCALE_BYTES, _ROPE_BYTES = 4, 2


class Fp8Parts(NamedTuple):
    """Views of the parts of FP8 rows.

    Attributes:
        values: uint8 [..., C], the bits of e4m3.
        scales: fp32 [..., C / 128].
        k_rope: bf16 [..., R].
    """

    values: Tensor
    scales: Tensor
    k_rope: Tensor


@dataclass(frozen=True)
class Fp8Latents:
    """Makes rows of bytes, as the module describes them, and reads them.

    A group with an infinity or a NaN is read as NaN, all of it.

    Attributes:
        name: Of the option's value.
        kv_lora_rank: C. The last of its groups may be smaller than 128.
        rope: R, may be 0.

    Raises:
        ValueError: If a row of such widths has no place for its scales.
    """

    kv_lora_rank: int
    rope: int

    name = "fp8"

    @classmethod
    def of(cls, latent_cache_dtype: str, kv_lora_rank: int, rope: int) -> Fp8Latents | None:
        """For an option's value; None for latents as the model computed them."""
        return cls(kv_lora_rank, rope) if latent_cache_dtype == cls.name else None

    def __post_init__(self) -> None:
        if self.kv_lora_rank % _SCALE_BYTES:
            raise ValueError(
                f"latent_cache_dtype='fp8' needs a kv_lora_rank that is a multiple of "
                f"{_SCALE_BYTES}, got {self.kv_lora_rank}; use 'model'"
            )

    @property
    def num_scales(self) -> int:
        """Of a row."""
        return -(-self.kv_lora_rank // GROUP)

    @property
    def used_bytes(self) -> int:
        """Of a row; those behind them are zero."""
        return self.kv_lora_rank + self.num_scales * _SCALE_BYTES + self.rope * _ROPE_BYTES

    @property
    def row_bytes(self) -> int:
        """Width of a row."""
        return -(-self.used_bytes // _ALIGNMENT) * _ALIGNMENT

    def parts(self, rows: Tensor) -> Fp8Parts:
        """Views of rows, uint8 [..., row_bytes] of any strides that are multiples of 16."""
        assert rows.dtype == torch.uint8 and rows.shape[-1] == self.row_bytes
        scales = self.kv_lora_rank + self.num_scales * _SCALE_BYTES
        return Fp8Parts(
            rows[..., : self.kv_lora_rank],
            rows[..., self.kv_lora_rank : scales].view(torch.float32),
            rows[..., scales : self.used_bytes].view(torch.bfloat16),
        )

    def like(self, kv: Tensor) -> Tensor:
        """A tensor with the shape, dtype and device of the rows of ``kv``, and any contents."""
        one = kv.new_empty((), dtype=torch.uint8)
        return one.expand(*kv.shape[:-1], self.row_bytes)

    @torch.compiler.disable
    def encode(self, kv: Tensor) -> Tensor:
        """Rows [..., row_bytes] of [latent | k_rope] [..., C + R] in any float dtype.

        Values are rounded to nearest, ties to even.
        """
        rows = kv.new_empty(*kv.shape[:-1], self.row_bytes, dtype=torch.uint8)
        if self.used_bytes < self.row_bytes:  # not at DeepSeek's widths
            rows[..., self.used_bytes :].zero_()
        if kv.is_cuda:
            # Imported here, because machines without a GPU need not have Triton.
            from absorbed_mla.kernels.fp8_latents import encode

            encode(kv.reshape(-1, kv.shape[-1]), *self.parts(rows.view(-1, self.row_bytes)))
        else:
            self.encode_in_torch(kv, rows)
        return rows

    def encode_in_torch(self, kv: Tensor, rows: Tensor) -> None:
        """:meth:`encode` to ``rows`` in plain PyTorch: what the kernel is tested against."""
        parts, (latent, k_rope) = self.parts(rows), self._split(kv)
        groups = self._groups(latent.float())
        scales = groups.abs().amax(-1).clamp(min=LEAST) * RECIPROCAL_OF_LARGEST
        values = (groups / scales[..., None]).to(E4M3).flatten(-2)[..., : self.kv_lora_rank]
        parts.values.copy_(values.contiguous().view(torch.uint8))
        parts.scales.copy_(scales)
        parts.k_rope.copy_(k_rope)

    @torch.compiler.disable
    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[latent | k_rope] [..., C + R]: products of value and scale in fp32, in ``dtype``."""
        kv = rows.new_empty(*rows.shape[:-1], self.kv_lora_rank + self.rope, dtype=dtype)
        if rows.is_cuda:
            from absorbed_mla.kernels.fp8_latents import decode

            flat = rows.reshape(-1, self.row_bytes)
            decode(*self.parts(flat), kv.view(-1, kv.shape[-1]))
        else:
            self.decode_in_torch(rows, kv)
        return kv

    def decode_in_torch(self, rows: Tensor, kv: Tensor) -> None:
        """:meth:`decode` to ``kv`` in plain PyTorch: what the kernel is tested against."""
        parts, (latent, k_rope) = self.parts(rows), self._split(kv)
        wide = self._groups(parts.values.contiguous().view(E4M3).float())
        latent.copy_((wide * parts.scales[..., None]).flatten(-2)[..., : self.kv_lora_rank])
        k_rope.copy_(parts.k_rope)

    # torch.compile would trace into the kernels.
    @torch.compiler.disable
    def rounded(self, kv: Tensor) -> Tensor:
        """[latent | k_rope] as read from the cache; its gradient is that of ``kv``."""
        return _StraightThrough.apply(kv, self)

    def _split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[..., : self.kv_lora_rank], kv[..., self.kv_lora_rank :]

    def _groups(self, latent: Tensor) -> Tensor:
        """[..., groups, 128 or C], with zeros behind the last group."""
        missing = self.num_scales * min(GROUP, self.kv_lora_rank) - self.kv_lora_rank
        return F.pad(latent, (0, missing)).unflatten(-1, (self.num_scales, -1))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv: Tensor, latents: Fp8Latents) -> Tensor:
        return latents.decode(latents.encode(kv), kv.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
