"""FlashAttention-4's kernels (the flash-attn-4 package), for every layout of sequences."""

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
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.varlen import VarlenCall, varlen_calls
from absorbed_mla.core_attention.max_logits_search import record_by_search, why_not_search
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class FlashAttention4Backend:
    """Multi-head attention in fp16 or bf16: one call for all sequences, whatever their lengths."""

    name = "flash_attention_4"
    summary = "the flash-attn-4 package, Hopper, head widths of DeepSeek's models"
    forms = ("expanded",)
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (740.0, 470.0)}
    searches_max_logits = True
    reads_device_spans = False
    adds_query_gradients = False
    windows = False
    sinks = False

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        reason = why_not_fused(request) or why_not_installed(request.key_width, request.value_width)
        if reason is None and torch.cuda.get_device_capability(request.device)[0] != 9:
            reason = "it was tried on compute capability 9.0 only"
        return reason or (why_not_search() if request.max_logits else None)

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the inputs."""
        q, k, v = inputs.as_multi_head()
        tokens, batch, heads, _ = q.shape
        make = torch.empty if rules.spans.cover(tokens) else torch.zeros
        out = make(tokens, batch, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        # [B, N, S], as the kernel writes it.
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
        if make is torch.zeros:
            lse.fill_(-torch.inf)
        for call in varlen_calls(rules.spans, q.shape[1] == 1):
            _forward(call, q, k, v, rules.scale, out, lse)
        output = AttentionOutput(out, lse.permute(2, 0, 1))
        record_by_search(q, k, output.lse, rules)
        return output

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``; gradients have the dtype of the inputs."""
        q, k, v = inputs.as_multi_head()
        make = torch.empty_like if rules.spans.cover(q.shape[0]) else torch.zeros_like
        dq = make(q, memory_format=torch.contiguous_format)
        calls = varlen_calls(rules.spans, q.shape[1] == 1)
        # What the call with the most keys writes is the sum that smaller parts are added to.
        largest = max(calls, key=lambda call: call.num_keys, default=None)
        full = largest is not None and largest.num_keys == len(k)
        sums = [(torch.empty_like if full else torch.zeros_like)(x) for x in (k, v)]
        for call in sorted(calls, key=lambda call: call is not largest):
            parts = [_part(x, call.keys) for x in sums]
            if call is not largest:
                # Rows between spans are not written.
                together = call.num_keys == len(parts[0])
                make = torch.empty_like if together else torch.zeros_like
                parts = [make(x, memory_format=torch.contiguous_format) for x in parts]
            _backward(call, grad, output, (q, k, v), rules.scale, (dq, *parts))
            if call is not largest:
                for total, part in zip(sums, parts):
                    total[call.keys].add_(part)
        return inputs.multi_head_gradient(dq, *sums)


def _forward(
    call: VarlenCall, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Attend for the queries of ``call`` and write their rows of ``out`` and ``lse``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    keys = _part(k, call.keys), _part(v, call.keys)
    lengths, (q, out), (k, v) = _arguments(call, (q, out), keys)
    whole = call.queries == slice(0, lse.shape[2])
    part_lse = lse if whole else lse[:, :, call.queries]
    # Contiguous [B, N, S], as the kernel writes it: a copy if the call has a part of the queries.
    written = part_lse.contiguous()
    _flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=call.causal,
        out=out,
        lse=written[0] if lengths else written,
        **lengths,
    )
    if written is not part_lse:
        part_lse.copy_(written)


def _backward(
    call: VarlenCall,
    grad: OutputGradient,
    output: AttentionOutput,
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of all queries, and of the keys of ``call``."""
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v = qkv
    dq, dk, dv = gradients
    lengths, (q, out, grad_out, dq), (k, v, dk, dv) = _arguments(
        call, (q, output.out, grad.out, dq), (_part(k, call.keys), _part(v, call.keys), dk, dv)
    )
    rows = (
        None if x is None else _heads_first(_part(x, call.queries)) for x in (output.lse, grad.lse)
    )
    lse, grad_lse = (x[0] if lengths and x is not None else x for x in rows)
    _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        softmax_scale=scale,
        causal=call.causal,
        deterministic=torch.get_deterministic_debug_mode() == DETERMINISM_REQUIRED,
        dlse=grad_lse,
        dq=dq,
        dk=dk,
        dv=dv,
        **lengths,
    )


def _arguments(call: VarlenCall, on_queries: tuple[Tensor, ...], on_keys: tuple[Tensor, ...]):
    """The kernel's names for lengths, and views of the tensors [S, B, N, D] as it takes them.

    One sequence keeps its batch, [B, S, N, D]; several lie one after the other, [S, N, D]. Tensors
    have all queries, or the keys of the call.
    """
    on_queries = tuple(_part(x, call.queries) for x in on_queries)
    if len(call.spans) == 1:
        swapped = ([x.transpose(0, 1) for x in tensors] for tensors in (on_queries, on_keys))
        return {}, *swapped
    assert on_queries[0].shape[1] == 1, "sequences of a batch would need boundaries of their own"
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = call.starts(on_queries[0].device)
    longest_q, longest_k = call.longest
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": used_q,
        "seqused_k": used_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }
    return lengths, [x[:, 0] for x in on_queries], [x[:, 0] for x in on_keys]


def _part(x: Tensor, rows: slice) -> Tensor:
    """Some rows of ``x``; itself, at no cost, where that is all of it."""
    return x if rows == slice(0, x.shape[0]) else x[rows]


def _heads_first(x: Tensor) -> Tensor:
    """[S, B, N] as contiguous [B, N, S]."""
    return x.permute(1, 2, 0).contiguous()


# (key, value) whose kernels, forward and backward, were tested on a GPU; others may not compile.
_WIDTHS = ((192, 128), (128, 128), (64, 64))
# The first one whose functions were called as they are here; they are not public ones.
_OLDEST = "4.0.0b36"
# What the import hangs on, and the version that was tested with it.
_COMPILER, _TESTED = "nvidia-cutlass-dsl", "4.8.1"


def _installed(package: str) -> str:
    """Its version, in words."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def why_not_installed(key_width: int, value_width: int) -> str | None:
    """Why flash-attn-4 cannot attend with these head widths, or None."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if Version(version) < Version(_OLDEST):
        return f"flash-attn-4 {_OLDEST} or newer is needed, {version} is installed"
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    # The import can fail in any way, also where another package has that name; others still run.
    except Exception as error:
        return (
            f"flash-attn-4 {version} cannot be imported ({type(error).__name__}: {error}); "
            f"{_COMPILER} is {_installed(_COMPILER)}, tested was {_OLDEST} with {_TESTED}"
        )
    missing = {"_flash_attn_fwd", "_flash_attn_bwd"} - set(dir(interface))
    if missing:
        return f"flash-attn-4 {version} has no {' and '.join(sorted(missing))}"
    if (key_width, value_width) not in _WIDTHS:
        return f"head widths {(key_width, value_width)} are not among {_WIDTHS}"
    return None


ENTRY = FlashAttention4Backend()
