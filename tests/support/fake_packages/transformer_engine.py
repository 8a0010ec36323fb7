"""TransformerEngine's fused attention, as far as it is used, computing in float64.

Strides are taken for granted as they are there: what is not contiguous is refused here.
"""

import importlib.metadata
import sys
from collections import defaultdict
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from tests.support.fake_packages import kit

_WITH_PADDING = {"thd_thd_thd": True, "sbhd_sbhd_sbhd": False}
_NAMES = ("QKVLayout", "AttnBiasType", "AttnMaskType", "SoftmaxType", "FusedAttnBackend")


@dataclass(frozen=True)
class Call:
    function: str
    layout: str
    mask: str
    deterministic: bool | None = None
    dtype: str | None = None


class FusedAttention(ModuleType):
    """transformer_engine.pytorch.cpp_extensions.fused_attn."""

    BACKEND_F16arb_ELTS_PER_THREADS = 16

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch.cpp_extensions.fused_attn")
        self.calls: list[Call] = []
        for name in _NAMES:
            setattr(self, name, _Names(name))

    # "lengths" are max_seqlen_q, max_seqlen_kv, cu_seqlens_q and cu_seqlens_kv, by position.
    def fused_attn_fwd(self, is_training, *positional, attn_scale, **layout):
        """Output, and [LSE, state of the generator]; what it does not write of the LSE is NaN."""
        *lengths, q, k, v, fake_dtype, backend = positional
        assert is_training and fake_dtype == q.dtype
        assert backend == self.FusedAttnBackend["F16_arbitrary_seqlen"]
        call = _Layout(*lengths, (q, k, v), **layout)
        self.calls.append(Call("forward", call.layout, call.mask))
        out, stats, _ = call.attend(q, k, v, attn_scale)
        return out, [stats, torch.zeros(2, dtype=torch.int64, device=q.device)]

    # transformer_engine_torch.fused_attn_fwd, which the function above calls by position.
    def operator(
        self, max_seqlen_q, max_seqlen_kv, is_training, attn_scale, dropout, set_zero, layout, bias,
        mask, softmax, window_size, bottom_right, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        padded_q, padded_kv, pages_k, pages_v, s_quantizer, o_quantizer, attn_bias, offset, rng_gen,
        rng_elts_per_thread, return_max_logit, cuda_graph,
    ):  # fmt: skip
        """Output, largest scores, sums of exponentials, and state of the generator."""
        assert is_training and not dropout and set_zero and fake_dtype == q.dtype
        assert bias == self.AttnBiasType["no_bias"] and softmax == self.SoftmaxType["vanilla"]
        unused = (pages_k, pages_v, s_quantizer, o_quantizer, attn_bias, offset, rng_gen)
        assert all(x is None for x in unused)
        assert rng_elts_per_thread == self.BACKEND_F16arb_ELTS_PER_THREADS and return_max_logit
        call = _Layout(
            *(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, (q, k, v)),
            qkv_layout=layout.removeprefix("QKVLayout."),
            attn_mask_type=mask.removeprefix("AttnMaskType."),
            window_size=window_size,
            cuda_graph=cuda_graph,
            cu_seqlens_q_padded=padded_q,
            cu_seqlens_kv_padded=padded_kv,
        )
        assert bottom_right == (call.kind == "causal_bottom_right")
        self.calls.append(Call("operator", call.layout, call.mask))
        out, lse, largest = call.attend(q, k, v, attn_scale)
        return [out, largest, (lse - largest).exp(), torch.zeros(2, dtype=torch.int64)]

    def fused_attn_bwd(self, *positional, attn_scale, deterministic, **layout):
        """Gradients of q, k and v, zero between sequences, and two unused results."""
        *lengths, q, k, v, o, d_o, fake_dtype, dqkv_dtype, (stats, state), backend = positional
        assert fake_dtype == q.dtype == d_o.dtype == o.dtype
        assert backend == self.FusedAttnBackend["F16_arbitrary_seqlen"]
        call = _Layout(*lengths, (q, k, v), **layout)
        assert stats.shape == call.stats_shape and stats.dtype == torch.float32
        assert stats.is_contiguous() and o.is_contiguous() and d_o.is_contiguous()
        assert bool(torch.isfinite(stats).all()), "exp(-inf - -inf) is not a number"
        assert state.shape == (2,) and state.dtype == torch.int64
        self.calls.append(Call("backward", call.layout, call.mask, deterministic, dqkv_dtype))
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for queries, keys in call.sequences:
            lse, offset = call.stats_of(stats, queries), call.offset(q[queries], k[keys])
            rows = (q[queries], k[keys], v[keys], o[queries], lse, d_o[queries])
            found = kit.gradients(*rows, attn_scale, offset)
            for grad, where, part in zip(grads, (queries, keys, keys), found):
                grad[where] = part.to(grad)
        return [*grads, None, None]


class _Layout:
    """Layout and mask of a call, checked as TransformerEngine and cuDNN check them."""

    def __init__(
        self,
        max_seqlen_q,
        max_seqlen_kv,
        cu_seqlens_q,
        cu_seqlens_kv,
        tensors,
        *,
        qkv_layout,
        attn_mask_type,
        window_size,
        cuda_graph,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    ) -> None:
        q, k, v = tensors
        layout, mask = self.layout, self.mask = qkv_layout, attn_mask_type
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        longest = (max_seqlen_q, max_seqlen_kv)
        assert cuda_graph is False
        assert all(x.is_contiguous() for x in tensors)
        assert all(x is None or x.dtype == torch.int32 for x in lengths)
        self.packed = _WITH_PADDING[layout]
        kind = mask.removeprefix("padding").removeprefix("_") or "no_mask"
        assert kind in ("no_mask", "causal", "causal_bottom_right")
        assert mask.startswith("padding") == self.packed
        assert window_size == ((-1, -1) if kind == "no_mask" else (-1, 0))
        self.kind = kind
        used = [x.diff() for x in lengths[:2]]
        assert longest == tuple(int(x.max()) for x in used)
        if kind == "causal_bottom_right":
            # cuDNN gets all rows of a pack as one sequence.
            assert longest[0] <= longest[1] and len(q) <= len(k)
        if self.packed:
            heads = q.shape[1]
            self.stats_shape = (len(q), heads, 1)
            assert lengths[2][-1] == len(q) and lengths[3][-1] == len(k)
            self.sequences = kit.sequences(*lengths[2:], *used)
        else:
            batch, heads = q.shape[1:3]
            assert (batch, len(q), len(k)) != (1, 1, 1), "cuDNN refuses one pair"
            self.stats_shape = (batch, heads, len(q), 1)
            assert all(len(x) == batch for x in used) and len(v) == len(k)
            self.sequences = [((slice(None), b), (slice(None), b)) for b in range(batch)]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, LSE and largest scores; what is not written of the last two is NaN."""
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse, largest = (torch.full(self.stats_shape, torch.nan, device=q.device) for _ in range(2))
        for queries, keys in self.sequences:
            rows, columns = q[queries], k[keys]
            offset = self.offset(rows, columns)
            found, found_lse = kit.attend(rows, columns, v[keys], scale, offset)
            out[queries] = found.to(out)
            self.stats_of(lse, queries).copy_(found_lse)
            self.stats_of(largest, queries).copy_(kit.largest(rows, columns, scale, offset))
        return out, lse, largest

    def offset(self, q: Tensor, k: Tensor) -> int | None:
        """Query i sees keys up to i + offset."""
        return {"no_mask": None, "causal": 0, "causal_bottom_right": len(k) - len(q)}[self.kind]

    def stats_of(self, stats: Tensor, queries) -> Tensor:
        """The part [N, Q] of a sequence."""
        return stats[queries][..., 0].t() if self.packed else stats[queries[1], :, :, 0]


class _Names(defaultdict):
    """An enumeration: any name, as itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> str:
        return f"{self.kind}.{name}"


def install(monkeypatch, version: str = "2.12.0", cudnn: int = 91900) -> FusedAttention:
    """In place of the package, whether or not there is one."""
    fused = FusedAttention()
    found = importlib.metadata.version

    def version_of(name: str) -> str:
        return version if name == "transformer_engine" else found(name)

    library = ModuleType("transformer_engine_torch")
    library.DType = SimpleNamespace(kFloat16="kFloat16", kBFloat16="kBFloat16")
    library.get_cudnn_version = lambda: cudnn
    library.fused_attn_fwd = fused.operator
    library.get_fused_attn_backend = lambda *_: fused.FusedAttnBackend["F16_arbitrary_seqlen"]
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setitem(sys.modules, library.__name__, library)
    kit.install(monkeypatch, fused.__name__, fused)
    return fused
