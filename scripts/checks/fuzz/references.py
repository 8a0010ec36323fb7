"""Attention, products and FP8 rows by PyTorch; what is rounded has the noise of ``compare.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The spacing of fp16 near 0, in which small probabilities and their gradients are rounded.
_SPACING = 2.0**-24


class Exact(NamedTuple):
    """A result in fp64, and its noise."""

    value: Tensor
    noise: Tensor


class Attended(NamedTuple):
    """Attention of every head."""

    out: Exact  # [S_q, B, N, V]
    lse: Tensor  # [S_q, B, N]; -inf where a query sees nothing
    largest: Tensor  # largest score of each row, likewise
    probs: Tensor  # [B, N, S_q, S_k]


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, dtype: torch.dtype
) -> Attended:
    """Softmax attention.

    Args:
        q: fp64 [S_q, B, N, D].
        k: fp64 [S_k, B, N or 1, D].
        v: fp64 [S_k, B, N or 1, V].
        scale: Multiplies the scores.
        seen: bool, can be expanded to [B, N, S_q, S_k].
        dtype: Of the kernel's operands.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    scores = _times(q, k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    if not scores.shape[-1]:
        scores = F.pad(scores, (0, 1), value=-torch.inf)
        v = F.pad(v, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = _times(probs, v)
    # Probabilities are rounded relative to the largest one, and the output once more.
    noise = (_times(rounded_squares(probs, dtype), v.square()) + out.square()).sqrt()
    rows = lse.permute(2, 0, 1), scores.amax(-1).permute(2, 0, 1)
    return Attended(Exact(*(x.permute(2, 0, 1, 3) for x in (out, noise))), *rows, probs)


def beside_sink(attended: Attended, sink: Tensor) -> Attended:
    """Attention whose softmax has one more logit of each head, fp64 [N], without a value."""
    lse = attended.lse.logaddexp(sink)
    kept = torch.exp(attended.lse - lse)
    out = Exact(*(x * kept[..., None] for x in attended.out))
    probs = attended.probs * kept.permute(1, 2, 0)[..., None]
    return attended._replace(out=out, lse=lse, probs=probs)


def sink_gradient(
    attended: Attended, grads: tuple[Tensor, Tensor | None], sink: Tensor, dtype: torch.dtype
) -> Exact:
    """Of the sink beside which it is, [N, 1]; the rest as in :func:`attention_gradients`."""
    grad_out, grad_lse = (x if x is None else x.double() for x in grads)
    delta = (attended.out.value * grad_out).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    share = torch.exp(sink - attended.lse)
    value = -(share * delta).sum((0, 1))
    lost = (attended.out.noise.square() + _absolute(dtype)) * grad_out.square()
    lost = lost.sum(-1) + delta.square()
    noise = ((share.square() * lost).sum((0, 1)) + value.square()).sqrt()
    return Exact(value[:, None], noise[:, None])


class Gradients(NamedTuple):
    """Of queries [S_q, B, N, D], keys and values [S_k, B, N, ..]; noise likewise."""

    q: Exact
    k: Exact
    v: Exact

    def latent(self) -> Exact:
        """Of a latent that is value, and the beginning of the key."""
        width = self.v.value.shape[-1]
        value, noise = (x.clone() for x in self.k)
        value[..., :width] += self.v.value
        noise[..., :width] = (noise[..., :width].square() + self.v.noise.square()).sqrt()
        return Exact(value, noise)


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    grads: tuple[Tensor, Tensor | None],
    scale: float,
    dtype: torch.dtype,
) -> Gradients:
    """Of :func:`attention` with the same arguments; those of shared keys are summed over heads.

    ``grads`` are those of the output [S_q, B, N, V] and of the LSE [S_q, B, N], or None.
    """
    shared = k.shape[2] != q.shape[2]
    grad_out, grad_lse = (x if x is None else x.double() for x in grads)
    q, k, v, grad_out = (x.permute(1, 2, 0, 3) for x in (q, k, v, grad_out))
    probs = attended.probs[..., : k.shape[2]]
    dp = _times(grad_out, v.transpose(-1, -2))
    delta = (probs * dp).sum(-1, keepdim=True)
    out = attended.out.value.permute(1, 2, 0, 3)
    parts = (probs.square() * dp.square()).sum(-1, keepdim=True)
    parts = parts + (out.square() * grad_out.square()).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.permute(1, 2, 0)[..., None]
    ds = probs * (dp - delta) * scale
    # What dS loses: its own rounding, and that of the output, by which delta is computed.
    lost = (probs * scale).square() * (dp.square() + delta.square() + parts) + _absolute(dtype)
    lost = torch.where(probs > 0, lost, 0.0)
    rounded = rounded_squares(probs, dtype)
    pairs = (
        (_times(ds, k), _times(lost, k.square())),
        (_to_keys(ds, q, shared), _to_keys(lost, q.square(), shared)),
        (_to_keys(probs, grad_out, shared), _to_keys(rounded, grad_out.square(), shared)),
    )
    found = (Exact(x, (n + x.square()).sqrt()) for x, n in pairs)
    return Gradients(*(Exact(*(x.permute(2, 0, 1, 3) for x in each)) for each in found))


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """[B, N, S, K] times [B, N or 1, K, M], without a copy of a matrix for every head."""
    if matrix.shape[1] == rows.shape[1]:
        return rows @ matrix
    return (rows.flatten(1, 2) @ matrix[:, 0]).unflatten(1, rows.shape[1:3])


def _to_keys(of_pairs: Tensor, rows: Tensor, shared: bool) -> Tensor:
    """What keys get from the rows [B, N, S_q, M]: [B, N, S_k, M], or of all heads [B, 1, ..]."""
    if not shared:
        return of_pairs.transpose(-1, -2) @ rows
    return (of_pairs.flatten(1, 2).transpose(-1, -2) @ rows.flatten(1, 2))[:, None]


def rounded_squares(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Squares of what rounding to a dtype loses, where ``x`` is not 0."""
    return torch.where(x != 0, x.square() + _absolute(dtype), 0.0)


def _absolute(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return (_SPACING / eps) ** 2 if dtype == torch.float16 else 0.0


def product(left: Tensor, right: Tensor, dtype: torch.dtype | None = None) -> Exact:
    """``left @ right`` of any floating types.

    The noise is for a result in ``dtype``; None: in fp32, in which sums are computed.
    """
    left, right = left.double(), right.double()
    value = left @ right
    return Exact(value, rounded_sum(value, left.square() @ right.square(), left.shape[-1], dtype))


def rounded_sum(
    value: Tensor, squares: Tensor, number: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The noise of a sum in fp32 that is rounded to ``dtype``.

    A sum of partial sums loses about the root of their number; ``squares`` is that of the
    summands.
    """
    fp32 = torch.finfo(torch.float32).eps
    eps = fp32 if dtype is None else torch.finfo(dtype).eps
    in_fp32 = squares * (fp32 / eps * (4 + number**0.5)) ** 2
    return (in_fp32 + value.square()).sqrt()


# Rows of a latent cache in FP8: C e4m3 values, fp32 scales of 128 of them, k_rope in bf16.
_GROUP, _ALIGNED = 128, 16
# The largest number of e4m3, and the least magnitude that a group's scale is computed for.
_LARGEST, _LEAST = 448, 2.0**-100


def fp8_parts(rows: Tensor, content: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values e4m3 [..., C], scales fp32 [..., C / 128] and k_rope bf16 of rows [..., C + R]."""
    latent, k_rope = rows[..., :content].float(), rows[..., content:]
    padded = F.pad(latent, (0, -content % _GROUP)).unflatten(-1, (-1, _GROUP))
    scales = padded.abs().amax(-1).clamp(min=_LEAST) * (1 / _LARGEST)
    values = (padded / scales[..., None]).clamp(-_LARGEST, _LARGEST)
    values = values.flatten(-2)[..., :content].to(torch.float8_e4m3fn)
    return values, scales, k_rope.bfloat16()


def fp8_bytes(values: Tensor, scales: Tensor, k_rope: Tensor) -> Tensor:
    """uint8 rows, whose bytes are a multiple of 16."""
    parts = [x for x in (values, scales, k_rope) if x.shape[-1]]
    # Not contiguous(), which leaves the strides of an empty tensor.
    rows = [x.clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in parts]
    rows = torch.cat(rows, -1)
    return F.pad(rows, (0, -rows.shape[-1] % _ALIGNED), value=0xFF)


def fp8_decoded(values: Tensor, scales: Tensor, k_rope: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., C + R] in ``dtype``, which the format is read in."""
    spread = scales.repeat_interleave(_GROUP, -1)[..., : values.shape[-1]]
    latent = (values.float() * spread).to(dtype)
    return torch.cat((latent, k_rope.to(dtype)), -1)
