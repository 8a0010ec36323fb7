"""cuDNN's fused attention through TransformerEngine: unlike PyTorch's operators it takes packs.

Its forward returns the LSE among the tensors for its backward, which takes it back: here from all
blocks of keys, not only from those of the call, as TransformerEngine's own context parallelism
does. The other such tensor is a generator's state, which nobody reads without dropout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata

import torch
from packaging.version import Version
from torch import Tensor

from absorbed_mla.core_attention.backends.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.by_identity import cached_by_identity
from absorbed_mla.core_attention.determinism import is_demanded
from absorbed_mla.core_attention.masks.gaps import lengths_alone, put_queries
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.varlen import Wave, boundaries, waves
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

_Tensors = tuple[Tensor, Tensor, Tensor]


class TransformerEngineAttention:
    """Multi-head attention in fp16 or bf16: one call for all sequences, whatever their lengths.

    Its forward advances PyTorch's CUDA generator, although it uses no random number.
    """

    name = "transformer_engine"

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output is in the dtype of the operands."""
        q, k, v = operands.as_multi_head()
        tokens, batch, heads, _ = q.shape
        out: Tensor | None = None
        # Queries are the last axis.
        lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=torch.float32)
        for wave in _calls(rules.spans, batch == 1):
            rows = (q[wave.queries], k[wave.keys], v[wave.keys])
            part, part_lse = _forward(wave, rows, rules.scale)
            out = _add_rows(out, part, wave.queries, tokens)
            put_queries(lse, part_lse.permute(1, 2, 0), wave)
        if out is None:
            out = q.new_zeros(tokens, batch, heads, v.shape[-1])
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``, which does it where the LSE has a gradient."""
        if grad.lse is not None:
            return reference_backward(grad, attended, operands, rules)
        whole = operands.as_multi_head()
        q, k, v = whole
        sums: list[Tensor | None] = [None, None, None]
        for wave in _calls(rules.spans, q.shape[1] == 1):
            queries, keys = wave.queries, wave.keys
            part = AttentionOutput(attended.out[queries], attended.lse[queries])
            rows = (q[queries], k[keys], v[keys])
            found = _backward(wave, rows, part, grad.out[queries], rules.scale)
            for i, where in enumerate((queries, keys, keys)):
                sums[i] = _add_rows(sums[i], found[i], where, len(whole[i]))
        dq, dk, dv = (torch.zeros_like(x) if s is None else s for s, x in zip(sums, whole))
        return operands.multi_head_gradient(dq, dk, dv)


def _add_rows(total: Tensor | None, part: Tensor, rows: slice, length: int) -> Tensor:
    """Add a part to what there is of all ``length`` rows, which may be nothing yet."""
    if total is None and len(part) == length:
        return part
    if total is None:
        total = part.new_zeros(length, *part.shape[1:])
    total[rows] += part
    return total


@cached_by_identity(maxsize=1024)
def _calls(spans: tuple[Span, ...], together: bool) -> tuple[Wave, ...]:
    """Waves; span by span where there are more queries than keys, gaps counted.

    cuDNN refuses to align a mask at the bottom right there, though no span has more queries.
    """
    found: list[Wave] = []
    for wave in waves(spans, together):
        queries, keys = (rows.stop - rows.start for rows in (wave.queries, wave.keys))
        if wave.causal and not _is_square(wave) and queries > keys:
            found += [Wave((span,), causal=True) for span in wave.spans]
        else:
            found.append(wave)
    return tuple(found)


@cached_by_identity(maxsize=1024)
def _is_square(wave: Wave) -> bool:
    """Whether every span has as many queries as keys: aligned both ways."""
    return all(s.query_end - s.query_start == s.key_end - s.key_start for s in wave.spans)


def _forward(wave: Wave, rows: _Tensors, scale: float) -> tuple[Tensor, Tensor]:
    """Output [S, B, N, V] and LSE [S, B, N] of the queries of ``wave``; 0 and anything in gaps."""
    if _is_pair(rows):
        return reference_forward(*_pair(rows, scale))
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

    call = _Call(wave, rows)
    q, k, v = (call.taken(x) for x in rows)
    out, (stats, *_) = fused_attn_fwd(
        True,
        *call.lengths,
        q,
        k,
        v,
        q.dtype,
        _kernels(),
        attn_scale=scale,
        **call.layout,
    )
    if call.together:
        return out.unsqueeze(1), stats.squeeze(-1).unsqueeze(1)
    return out, stats.squeeze(-1).permute(2, 0, 1)


def _backward(
    wave: Wave, rows: _Tensors, attended: AttentionOutput, grad_out: Tensor, scale: float
) -> _Tensors:
    """Gradients of the queries, keys and values of ``wave``; 0 in gaps."""
    if _is_pair(rows):
        grad = OutputGradient(grad_out, None)
        found = reference_backward(grad, attended, *_pair(rows, scale))
        assert found.value is not None  # as the value is not the key
        return found.q_content, found.k_content, found.value
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

    call = _Call(wave, rows)
    q, k, v, out, grad_out = (call.taken(x) for x in (*rows, attended.out, grad_out))
    # A query that sees nothing has no weights, whatever its scores are taken for.
    lse = attended.lse.masked_fill(attended.lse == -torch.inf, _NO_WEIGHT)
    stats = (lse[:, 0] if call.together else lse.permute(1, 2, 0)).unsqueeze(-1).contiguous()
    dq, dk, dv, *_ = fused_attn_bwd(
        *call.lengths,
        q,
        k,
        v,
        out,
        grad_out,
        q.dtype,
        _dtype(q.dtype),
        [stats, torch.zeros(2, dtype=torch.int64, device=q.device)],
        _kernels(),
        attn_scale=scale,
        deterministic=is_demanded(),
        **call.layout,
    )
    if call.together:
        return dq.unsqueeze(1), dk.unsqueeze(1), dv.unsqueeze(1)
    return dq, dk, dv


# As an LSE.
_NO_WEIGHT = 1e30


class _Call:
    """What a wave is in TransformerEngine's words.

    Args:
        wave: One span, of any batch, or several of one.
        rows: Its queries, keys and values.

    Attributes:
        together: Whether sequences lie one after the other (``thd``).
        lengths: The longest sequences, of queries and of keys, and sums of lengths of both.
        layout: Keywords of layout and mask, and whether a CUDA graph is being captured.
    """

    def __init__(self, wave: Wave, rows: _Tensors) -> None:
        q, k, _ = rows
        self.together = len(wave.spans) > 1
        mask = ["padding"] if self.together else []
        if wave.causal:
            mask += ["causal"] if _is_square(wave) else ["causal_bottom_right"]
        self.layout: dict[str, object] = {
            "attn_mask_type": "_".join(mask) or "no_mask",
            "window_size": (-1, 0) if wave.causal else (-1, -1),
            # What an older cuDNN cannot do in a graph raises then.
            "cuda_graph": q.is_cuda and torch.cuda.is_current_stream_capturing(),
        }
        self.lengths: tuple[int | Tensor, ...]
        if self.together:
            assert q.shape[1] == 1, "a batch would need boundaries of its own"
            starts_q, starts_k, _, _ = boundaries(wave, q.device)
            self.lengths = (*wave.longest, *lengths_alone(wave, q.device))
            self.layout["qkv_layout"] = "thd_thd_thd"
            self.layout |= {"cu_seqlens_q_padded": starts_q, "cu_seqlens_kv_padded": starts_k}
        else:
            self.lengths = (len(q), len(k), _starts(q), _starts(k))
            self.layout["qkv_layout"] = "sbhd_sbhd_sbhd"

    def taken(self, x: Tensor) -> Tensor:
        """[S, B, N, D], or [S, N, D] of one batch; its strides are taken for granted."""
        return (x[:, 0] if self.together else x).contiguous()


def _starts(x: Tensor) -> Tensor:
    """Boundaries of a batch [S, B, N, D]."""
    tokens, batch, _, _ = x.shape
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)


def _is_pair(rows: _Tensors) -> bool:
    """One query and one key, which cuDNN's backward refuses."""
    return len(rows[0]) == len(rows[1]) == 1


def _pair(rows: _Tensors, scale: float) -> tuple[AttentionInputs, ScoreRules]:
    return AttentionInputs.multi_head(*rows), ScoreRules(scale, (Span(0, 1, 0, 1, None),))


def _kernels():
    """TransformerEngine's name for its fp16 and bf16 kernels of any length."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    return FusedAttnBackend["F16_arbitrary_seqlen"]


def _dtype(dtype: torch.dtype):
    """TransformerEngine's name for a dtype."""
    names = importlib.import_module("transformer_engine_torch").DType
    return names.kBFloat16 if dtype == torch.bfloat16 else names.kFloat16


# Releases whose functions take the arguments they are called with here.
_OLDEST, _TOO_NEW = "2.12", "2.14"
# The first one that aligns masks of any lengths at the bottom right.
_OLDEST_CUDNN = 90700
# cuDNN 9.14 computes wrong gradients of packs (thd) with values 192 and 256 wide, 18 to 22 % off,
# and says nothing; up to 128 they are right. The first one seen to be right there is 9.19.
_WIDEST_PACKED_VALUE = 128
_OLDEST_CUDNN_FOR_WIDER = 91900
_INTERFACE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_ASKED = (("sbhd_sbhd_sbhd", "causal_bottom_right"), ("thd_thd_thd", "padding_causal_bottom_right"))


@functools.cache
def refusal(
    key_width: int, value_width: int, dtype: torch.dtype, deterministic: bool, packed: bool
) -> str | None:
    """Why TransformerEngine cannot attend with these head widths, or None."""
    try:
        version = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return "TransformerEngine is not installed"
    if not Version(_OLDEST) <= Version(version) < Version(_TOO_NEW):
        return f"TransformerEngine {_OLDEST} to below {_TOO_NEW} is needed, {version} is installed"
    try:
        interface = importlib.import_module(_INTERFACE)
        library = importlib.import_module("transformer_engine_torch")
    # Whatever is wrong with it, others can still attend.
    except Exception as error:
        return f"TransformerEngine {version} cannot be imported ({type(error).__name__}: {error})"
    if (cudnn := library.get_cudnn_version()) < _OLDEST_CUDNN:
        return f"cuDNN 9.7 or newer is needed, TransformerEngine found {cudnn}"
    if packed and value_width > _WIDEST_PACKED_VALUE and cudnn < _OLDEST_CUDNN_FOR_WIDER:
        loaded = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
        return (
            f"TransformerEngine {version} loaded cuDNN {loaded}, whose gradients of packs, and "
            f"under context parallelism, are wrong for values wider than {_WIDEST_PACKED_VALUE} "
            f"(here {value_width}); cuDNN 9.19 or newer is needed (LD_LIBRARY_PATH, CUDNN_HOME)"
        )
    for layout, mask in _ASKED:
        found = library.get_fused_attn_backend(
            True,  # training
            *(_dtype(dtype), _dtype(dtype)),
            interface.QKVLayout[layout],
            interface.AttnBiasType["no_bias"],
            interface.AttnMaskType[mask],
            interface.SoftmaxType["vanilla"],
            0.0,  # dropout
            *(16, 16),  # heads
            *(1024, 2048),  # tokens
            *(key_width, value_width),
            *(-1, 0),  # window
            *(False, False),  # no maximum of the logits, no graph
            deterministic,
        )
        if found != _kernels():
            widths = (key_width, value_width)
            return f"it has no kernel for head widths {widths}, layout {layout}, mask {mask}"
    return None
