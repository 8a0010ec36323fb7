"""cuDNN's fused attention through TransformerEngine, which also takes packs (``thd``).

Forward returns the LSE as one of the tensors for backward. Backward here gets the LSE over all
blocks of keys, not only over those of the call, as TransformerEngine's own context parallelism
does. The other such tensor is the state of a random generator, which is not read without dropout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping

import torch
from packaging.version import Version
from torch import Tensor

from absorbed_mla.core_attention.backend import (
    DETERMINISM_REQUIRED,
    AttentionRequest,
    why_not_fused,
)
from absorbed_mla.core_attention.backends.reference import (
    reference_backward,
    reference_forward,
    reference_one_pair,
    reference_one_pair_gradient,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.masks.varlen import VarlenCall, varlen_calls
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

_Tensors = tuple[Tensor, Tensor, Tensor]


class TransformerEngineBackend:
    """Multi-head attention in fp16 or bf16: one call for all sequences, whatever their lengths.

    Its forward advances PyTorch's CUDA generator, although it uses no random number.
    """

    name = "transformer_engine"
    summary = "cuDNN through TransformerEngine 2.12 or 2.13; Hopper or newer, packs in one call"
    forms = ("expanded",)
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (585.0, 455.0)}
    searches_max_logits = False
    reads_device_spans = False
    adds_query_gradients = False
    windows = False
    sinks = False

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        return why_not_fused(request) or why_not_installed(
            request.key_width,
            request.value_width,
            request.dtype,
            request.deterministic,
            request.packed,
            request.max_logits,
        )

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the inputs."""
        q, k, v = inputs.as_multi_head()
        tokens, batch, heads, _ = q.shape
        out: Tensor | None = None
        # [B, N, S]: queries are the last axis.
        lse = q.new_full((batch, heads, tokens), -torch.inf, dtype=torch.float32)
        for call in _calls(rules.spans, batch == 1):
            qkv = (q[call.queries], k[call.keys], v[call.keys])
            if rules.max_logits is None:
                part, part_lse = _forward(call, qkv, rules.scale)
            else:
                part, part_lse, largest = _forward_and_largest(call, qkv, rules.scale)
                rules.record(call.only_spans(largest, -torch.inf))
            out = _add_rows(out, part, call.queries, tokens)
            call.write_queries(lse, part_lse.permute(1, 2, 0))
        if out is None:
            out = q.new_zeros(tokens, batch, heads, v.shape[-1])
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``, which computes it where the LSE has a gradient."""
        if grad.lse is not None:
            return reference_backward(grad, output, inputs, rules)
        whole = inputs.as_multi_head()
        q, k, v = whole
        sums: list[Tensor | None] = [None, None, None]
        for call in _calls(rules.spans, q.shape[1] == 1):
            queries, keys = call.queries, call.keys
            part = AttentionOutput(output.out[queries], output.lse[queries])
            qkv = (q[queries], k[keys], v[keys])
            found = _backward(call, qkv, part, grad.out[queries], rules.scale)
            for i, rows in enumerate((queries, keys, keys)):
                sums[i] = _add_rows(sums[i], found[i], rows, len(whole[i]))
        dq, dk, dv = (torch.zeros_like(x) if s is None else s for s, x in zip(sums, whole))
        return inputs.multi_head_gradient(dq, dk, dv)


def _add_rows(total: Tensor | None, part: Tensor, rows: slice, length: int) -> Tensor:
    """Add ``part`` to rows of ``total`` [length, ...]; None stands for zeros."""
    if total is not None:
        total[rows].add_(part)
        return total
    if len(part) == length:
        return part
    total = part.new_empty(length, *part.shape[1:])
    total[rows].copy_(part)
    for others in (slice(0, rows.start), slice(rows.stop, length)):
        total[others].zero_()
    return total


def _calls(spans: Spans, together: bool) -> tuple[VarlenCall, ...]:
    """Varlen calls, but one call a span where there are more queries than keys.

    cuDNN refuses to align a mask at the bottom right there. It counts rows between spans too: a
    call can have more queries than keys although no span has. The call with the most keys is first,
    because what it finds is the sum that smaller parts are added to.
    """

    def make() -> tuple[VarlenCall, ...]:
        calls: list[VarlenCall] = []
        for call in varlen_calls(spans, together):
            queries, keys = (rows.stop - rows.start for rows in (call.queries, call.keys))
            if call.causal and not call.is_square and queries > keys:
                calls += [VarlenCall((span,), causal=True) for span in call.spans]
            else:
                calls.append(call)
        return tuple(sorted(calls, key=lambda call: -call.num_keys))

    return spans.tables.get(("TransformerEngine", together), make)


def _forward(call: VarlenCall, qkv: _Tensors, scale: float) -> tuple[Tensor, Tensor]:
    """Output [S, B, N, V] and LSE [S, B, N] of the queries of ``call``.

    Rows between spans have output 0 and any LSE.
    """
    if _is_one_pair(qkv):
        return reference_forward(*reference_one_pair(*qkv, scale))
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_fwd

    arguments = _KernelArguments(call, qkv)
    q, k, v = (arguments.rows(x) for x in qkv)
    out, (stats, *_) = fused_attn_fwd(
        True, *arguments.lengths, q, k, v, q.dtype, _kernels(), attn_scale=scale, **arguments.layout
    )
    return _batched(out) if arguments.packed else out, arguments.of_queries(stats)


def _forward_and_largest(
    call: VarlenCall, qkv: _Tensors, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`_forward`, and the largest score [S, B, N] of every query.

    By the operator itself: its Python function keeps a maximum over all rows, those between spans
    included, which hold anything, and rounds it to the dtype of the output.
    """
    if _is_one_pair(qkv):
        out, lse = reference_forward(*reference_one_pair(*qkv, scale))
        return out, lse, lse
    interface = importlib.import_module(_INTERFACE)
    operator = importlib.import_module("transformer_engine_torch").fused_attn_fwd
    arguments = _KernelArguments(call, qkv)
    layout = arguments.layout
    q, k, v = (arguments.rows(x) for x in qkv)
    longest_q, longest_k, *cu_seqlens = arguments.lengths
    out, largest, total, *_ = operator(
        *(longest_q, longest_k),
        True,  # training
        scale,
        0.0,  # dropout
        True,  # zeros between sequences, in one fast kernel
        interface.QKVLayout[layout["qkv_layout"]],
        interface.AttnBiasType["no_bias"],
        interface.AttnMaskType[layout["attn_mask_type"]],
        interface.SoftmaxType["vanilla"],
        layout["window_size"],
        str(layout["attn_mask_type"]).endswith("bottom_right"),
        *cu_seqlens,
        *(q, k, v),
        q.dtype,
        *(layout.get("cu_seqlens_q_padded"), layout.get("cu_seqlens_kv_padded")),
        *(None, None),  # pages
        *(None, None),  # quantizers
        *(None, None),  # bias, sink
        None,  # generator
        interface.BACKEND_F16arb_ELTS_PER_THREADS,
        True,  # largest score and sum of exponentials in place of the LSE
        layout["cuda_graph"],
    )
    lse = total.log_().add_(largest)
    lse, largest = (arguments.of_queries(x) for x in (lse, largest))
    return _batched(out) if arguments.packed else out, lse, largest


def _batched(rows: Tensor) -> Tensor:
    """[S, N, D] of a pack as a batch of one."""
    return rows.unsqueeze(1)


def _backward(
    call: VarlenCall, qkv: _Tensors, output: AttentionOutput, grad_out: Tensor, scale: float
) -> _Tensors:
    """Gradients of the queries, keys and values of ``call``; 0 for rows between spans."""
    if _is_one_pair(qkv):
        return reference_one_pair_gradient(grad_out, output, *qkv, scale)
    from transformer_engine.pytorch.cpp_extensions.fused_attn import fused_attn_bwd

    arguments = _KernelArguments(call, qkv)
    q, k, v, out, grad_out = (arguments.rows(x) for x in (*qkv, output.out, grad_out))
    # A query that sees no key has LSE -inf; with this one its probabilities are 0, not NaN.
    lse = output.lse.masked_fill(output.lse == -torch.inf, _LSE_OF_NO_KEY)
    stats = (lse[:, 0] if arguments.packed else lse.permute(1, 2, 0)).unsqueeze(-1).contiguous()
    dq, dk, dv, *_ = fused_attn_bwd(
        *arguments.lengths,
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
        deterministic=torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED,
        **arguments.layout,
    )
    return (_batched(dq), _batched(dk), _batched(dv)) if arguments.packed else (dq, dk, dv)


_LSE_OF_NO_KEY = 1e30


class _KernelArguments:
    """A call, translated to the arguments of TransformerEngine's functions.

    Args:
        call: One span, of any batch, or several spans of a batch of 1.
        qkv: Its queries, keys and values.

    Attributes:
        packed: Whether sequences lie one after the other (``thd``).
        lengths: Longest sequence of queries and of keys, and cu_seqlens of both.
        layout: Keywords for layout and mask, and whether a CUDA graph is being captured.
    """

    def __init__(self, call: VarlenCall, qkv: _Tensors) -> None:
        q, k, _ = qkv
        self.packed = len(call.spans) > 1
        mask = ["padding"] if self.packed else []
        if call.causal:
            mask += ["causal"] if call.is_square else ["causal_bottom_right"]
        self.layout: dict[str, object] = {
            "attn_mask_type": "_".join(mask) or "no_mask",
            "window_size": (-1, 0) if call.causal else (-1, -1),
            # With this an older cuDNN raises for what it cannot do in a graph.
            "cuda_graph": q.is_cuda and torch.cuda.is_current_stream_capturing(),
        }
        self.lengths: tuple[int | Tensor, ...]
        if self.packed:
            assert q.shape[1] == 1, "kernels take no batch of packs"
            starts_q, starts_k, _, _ = call.starts(q.device)
            self.lengths = (*call.longest, *call.cu_seqlens(q.device))
            self.layout["qkv_layout"] = "thd_thd_thd"
            self.layout |= {"cu_seqlens_q_padded": starts_q, "cu_seqlens_kv_padded": starts_k}
        else:
            self.lengths = (len(q), len(k), _batch_starts(q), _batch_starts(k))
            self.layout["qkv_layout"] = "sbhd_sbhd_sbhd"

    def rows(self, x: Tensor) -> Tensor:
        """[S, B, N, D], or [S, N, D] of a pack; contiguous, which the kernels assume."""
        return (x[:, 0] if self.packed else x).contiguous()

    def of_queries(self, stats: Tensor) -> Tensor:
        """What a kernel writes for every query, [T, N, 1] or [B, N, S, 1], as [S, B, N]."""
        stats = stats.squeeze(-1)
        return stats.unsqueeze(1) if self.packed else stats.permute(2, 0, 1)


def _batch_starts(x: Tensor) -> Tensor:
    """cu_seqlens of a batch [S, B, N, D], whose sequences have equal lengths."""
    tokens, batch, _, _ = x.shape
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=x.device)


def _is_one_pair(qkv: _Tensors) -> bool:
    """One query and one key, which cuDNN's backward refuses."""
    return len(qkv[0]) == len(qkv[1]) == 1


def _kernels():
    """TransformerEngine's name for its fp16 and bf16 kernels of any length."""
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    return FusedAttnBackend["F16_arbitrary_seqlen"]


def _dtype(dtype: torch.dtype):
    """TransformerEngine's name for a dtype."""
    names = importlib.import_module("transformer_engine_torch").DType
    return names.kBFloat16 if dtype == torch.bfloat16 else names.kFloat16


# Releases whose functions take the arguments that are passed here; below the second one.
_OLDEST, _TOO_NEW = "2.12", "2.14"
# The first one that aligns masks of any lengths at the bottom right.
_OLDEST_CUDNN = 90700
# cuDNN 9.14 computes wrong gradients of packs (thd) for v_head_dim 192 and 256, 18 to 22 % off and
# without an error; up to 128 they are right. 9.19 was the first to be right in every test.
_WIDEST_PACKED_VALUE = 128
_OLDEST_CUDNN_FOR_WIDER = 91900
# The one whose largest scores were tested.
_OLDEST_CUDNN_FOR_MAX_LOGITS = 91900
_INTERFACE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_ASKED = (("sbhd_sbhd_sbhd", "causal_bottom_right"), ("thd_thd_thd", "padding_causal_bottom_right"))


@functools.cache
def why_not_installed(
    key_width: int,
    value_width: int,
    dtype: torch.dtype,
    deterministic: bool,
    packed: bool,
    max_logits: bool = False,
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
    # The import can fail in any way; other backends still run.
    except Exception as error:
        return f"TransformerEngine {version} cannot be imported ({type(error).__name__}: {error})"
    if (cudnn := library.get_cudnn_version()) < _OLDEST_CUDNN:
        return f"cuDNN 9.7 or newer is needed, TransformerEngine found {cudnn}"
    loaded = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"
    if max_logits and cudnn < _OLDEST_CUDNN_FOR_MAX_LOGITS:
        return (
            f"TransformerEngine {version} loaded cuDNN {loaded}; cuDNN 9.19 or newer is needed for "
            "the largest scores (qk_clip, log_max_attention_logit)"
        )
    if packed and value_width > _WIDEST_PACKED_VALUE and cudnn < _OLDEST_CUDNN_FOR_WIDER:
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
            *(max_logits, False),  # no graph
            deterministic,
        )
        if found != _kernels():
            widths = (key_width, value_width)
            return f"it has no kernel for head widths {widths}, layout {layout}, mask {mask}"
    return None


ENTRY = TransformerEngineBackend()
