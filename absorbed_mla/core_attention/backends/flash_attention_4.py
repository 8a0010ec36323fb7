"""FlashAttention-4's kernels (the flash-attn-4 package), for every layout of sequences."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata

import torch
from packaging.version import Version
from torch import Tensor

from absorbed_mla.core_attention.determinism import is_demanded
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.varlen import Wave, boundaries, covers, waves
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient


class FlashAttention4:
    """Multi-head attention in fp16 or bf16: one call for all sequences, whatever their lengths."""

    name = "flash_attention_4"

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output is in the dtype of the operands."""
        q, k, v = operands.as_multi_head()
        tokens, batch, heads, _ = q.shape
        make = torch.empty if covers(rules.spans, tokens) else torch.zeros
        out = make(tokens, batch, heads, v.shape[-1], dtype=q.dtype, device=q.device)
        # As the kernel writes it: heads before tokens.
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
        if make is torch.zeros:
            lse.fill_(-torch.inf)
        for wave in waves(rules.spans, q.shape[1] == 1):
            _forward(wave, q, k, v, rules.scale, out, lse)
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``; gradients are in the dtype of the operands."""
        q, k, v = operands.as_multi_head()
        make = torch.empty_like if covers(rules.spans, len(q)) else torch.zeros_like
        dq = make(q, memory_format=torch.contiguous_format)
        dk = dv = None
        for wave in waves(rules.spans, q.shape[1] == 1):
            part_k, part_v = _key_gradients(wave, k, v)
            _backward(wave, grad, attended, (q, k, v), rules.scale, (dq, part_k, part_v))
            dk = part_k if dk is None else dk.add_(part_k)
            dv = part_v if dv is None else dv.add_(part_v)
        if dk is None or dv is None:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        return operands.multi_head_gradient(dq, dk, dv)


def _forward(
    wave: Wave, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Attend for the queries of ``wave`` and write their rows of ``out`` and ``lse``."""
    from flash_attn.cute.interface import _flash_attn_fwd

    lengths, (q, out), (k, v) = _call(wave, (q, out), (k, v))
    part_lse = lse[:, :, wave.queries]
    # It writes heads before tokens, in memory of its own where the wave is a part of the queries.
    written = part_lse.contiguous()
    _flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        causal=wave.causal,
        out=out,
        lse=written[0] if lengths else written,
        **lengths,
    )
    if written is not part_lse:
        part_lse.copy_(written)


def _backward(
    wave: Wave,
    grad: OutputGradient,
    attended: AttentionOutput,
    operands: tuple[Tensor, Tensor, Tensor],
    scale: float,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of the queries and keys of ``wave``."""
    from flash_attn.cute.interface import _flash_attn_bwd

    q, k, v = operands
    dq, dk, dv = gradients
    lengths, (q, out, grad_out, dq), (k, v, dk, dv) = _call(
        wave, (q, attended.out, grad.out, dq), (k, v, dk, dv)
    )
    rows = (None if x is None else _heads_first(x[wave.queries]) for x in (attended.lse, grad.lse))
    lse, grad_lse = (x[0] if lengths and x is not None else x for x in rows)
    _flash_attn_bwd(
        q,
        k,
        v,
        out,
        grad_out,
        lse,
        softmax_scale=scale,
        causal=wave.causal,
        deterministic=is_demanded(),
        dlse=grad_lse,
        dq=dq,
        dk=dk,
        dv=dv,
        **lengths,
    )


def _call(wave: Wave, on_queries: tuple[Tensor, ...], on_keys: tuple[Tensor, ...]):
    """The kernel's names for lengths, and views of the tensors [S, B, N, D] as it takes them.

    One sequence keeps its batch, [B, S, N, D]; several lie one after the other, [S, N, D].
    """
    on_queries = tuple(x[wave.queries] for x in on_queries)
    on_keys = tuple(x[wave.keys] for x in on_keys)
    if len(wave.spans) == 1:
        swapped = ([x.transpose(0, 1) for x in tensors] for tensors in (on_queries, on_keys))
        return {}, *swapped
    assert on_queries[0].shape[1] == 1, "sequences of a batch would need boundaries of their own"
    cu_seqlens_q, cu_seqlens_k, used_q, used_k = boundaries(wave, on_queries[0].device)
    longest_q, longest_k = wave.longest
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": used_q,
        "seqused_k": used_k,
        "max_seqlen_q": longest_q,
        "max_seqlen_k": longest_k,
    }
    return lengths, [x[:, 0] for x in on_queries], [x[:, 0] for x in on_keys]


def _key_gradients(wave: Wave, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the gradients; zero where the wave has keys that it does not write."""
    make = torch.empty_like if wave.num_keys == len(k) else torch.zeros_like
    return make(k), make(v)


def _heads_first(x: Tensor) -> Tensor:
    """[S, B, N] as contiguous [B, N, S]."""
    return x.permute(1, 2, 0).contiguous()


# (key, value) whose kernels, forward and backward, were tested on a GPU; others may not compile.
_WIDTHS = ((192, 128), (128, 128), (64, 64))
# The first one whose functions were called as they are here; they are not public ones.
_OLDEST = "4.0.0b36"


@functools.cache
def refusal(key_width: int, value_width: int) -> str | None:
    """Why flash-attn-4 cannot attend with these head widths, or None."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed"
    if Version(version) < Version(_OLDEST):
        return f"flash-attn-4 {_OLDEST} or newer is needed, {version} is installed"
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
    # Whatever is wrong with it, or with another package of that name, others can still attend.
    except Exception as error:
        return f"flash-attn-4 {version} cannot be imported ({type(error).__name__}: {error})"
    missing = {"_flash_attn_fwd", "_flash_attn_bwd"} - set(dir(interface))
    if missing:
        return f"flash-attn-4 {version} has no {' and '.join(sorted(missing))}"
    if (key_width, value_width) not in _WIDTHS:
        return f"head widths {(key_width, value_width)} are not among {_WIDTHS}"
    return None
