"""FlashAttention-3's forward over the latent: its ``qv`` argument makes it the absorbed form.

A score is ``q . k + qv . v`` there: q and k are the rotary parts, v the latent, qv the absorbed
query. The operator is taken from the flash-attn-3 package, or from vLLM's build of the same source
where somebody has loaded it (``torch.ops.load_library``); neither has a backward for it.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from absorbed_mla.core_attention.latent_kernels import LatentKernelBackend, hopper_refuses
from absorbed_mla.core_attention.masks.gaps import put_queries
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.varlen import Wave, boundaries, covers, waves
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

if TYPE_CHECKING:
    from absorbed_mla.core_attention.backend import AttentionRequest

# Widths of the latent and of the rotary part that its kernels with qv are compiled for.
_CONTENT = (256, 512)
_ROPE = 64
# The package's operators, and those of vLLM's build, which importing vLLM is too much for.
_NAMESPACES = ("flash_attn_3", "_vllm_fa3_C")
_LENGTHS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
)
_USED = ("q", "k", "v", "q_v", "out", "softmax_scale", "is_causal", *_LENGTHS)
# The same in every call. Splitting the keys among thread blocks would help a few queries only.
_FIXED = {
    "window_size_left": -1,
    "window_size_right": -1,
    "attention_chunk": 0,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 1,
    "sm_margin": 0,
    # vLLM's build has these besides.
    "cp_world_size": 1,
    "cp_rank": 0,
}


class FlashAttention3:
    """Forward by FlashAttention-3, backward by this package's kernels for the same GPU."""

    name = "flash_attention_3"

    def __init__(self) -> None:
        self._gradients = LatentKernelBackend("hopper")

    def forward(self, operands: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output is in the dtype of the query.

        What lies between sequences of the keys must be finite: it is multiplied by zero.
        """
        tokens, batch, heads, _ = operands.q_content.shape
        whole = covers(rules.spans, tokens)
        make = torch.empty if whole else torch.zeros
        q_content = operands.q_content
        out = make(q_content.shape, dtype=q_content.dtype, device=q_content.device)
        # As the kernel writes it: heads before tokens.
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q_content.device)
        if not whole:
            lse.fill_(-torch.inf)
        for wave in waves(rules.spans, batch == 1):
            put_queries(lse, _attend(wave, operands, rules.scale, out), wave)
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        attended: AttentionOutput,
        operands: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``LatentKernelBackend``."""
        return self._gradients.backward(grad, attended, operands, rules)


def flash_attention_3_refuses(request: AttentionRequest) -> str | None:
    """Why FlashAttention-3 cannot do this, or None."""
    content, rope = request.value_width, request.key_width - request.value_width
    if request.latent and not (content in _CONTENT and rope == _ROPE):
        return f"widths {content} (latent) and {rope} (rope) are not among {_CONTENT} and {_ROPE}"
    reason = hopper_refuses(request)
    if reason:
        return f"{reason} (as 'hopper', which computes its backward)"
    return operator_refusal()


def operator_refusal() -> str | None:
    """Why there is no operator of FlashAttention-3 to call, or None."""
    try:
        operator = _operator()
    # Whatever is wrong with it, others can still attend.
    except Exception as error:
        return f"FlashAttention-3 cannot be imported ({type(error).__name__}: {error})"
    arguments = operator._schema.arguments
    if missing := {*_USED} - {argument.name for argument in arguments}:
        return f"{operator} has no {', '.join(sorted(missing))}"
    unknown = [
        argument.name
        for argument in arguments
        if argument.name not in (*_USED, *_FIXED)
        and not isinstance(argument.type, torch.OptionalType)
    ]
    return f"{operator} needs {', '.join(unknown)}" if unknown else None


def _operator():
    """The operator that computes the forward.

    Raises:
        Exception: Whatever importing the package raises where nobody has loaded an operator.
    """
    for name in _NAMESPACES:
        if hasattr(getattr(torch.ops, name), "fwd"):
            return getattr(torch.ops, name).fwd.default
    importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3.fwd.default


@functools.cache
def _settings(operator) -> dict[str, object]:
    """What the operator takes besides the arguments of a call; None for what is not used."""
    names = (argument.name for argument in operator._schema.arguments)
    return {name: _FIXED.get(name) for name in names if name not in _USED}


def _attend(wave: Wave, operands: AttentionInputs, scale: float, out: Tensor) -> Tensor:
    """Attend for the queries of ``wave``: write their rows of ``out``, return the LSE [B, N, S].

    Always with boundaries of sequences, entry of the batch by entry: vLLM's build has no kernels
    without.
    """
    q_content, q_rope, latent, k_rope, _ = operands
    queries = (x[wave.queries] for x in (q_content, q_rope, out))
    keys = (x[wave.keys] for x in (k_rope.unsqueeze(2), latent))
    operator = _operator()
    lengths = dict(zip(_LENGTHS, (*boundaries(wave, out.device), *wave.longest)))
    parts = []
    for q_v, q, rows, k, v in zip(*(x.unbind(1) for x in (*queries, *keys))):
        _, lse, *_ = operator(
            q=q,
            k=k,
            v=v,
            q_v=q_v,
            out=rows,
            softmax_scale=scale,
            is_causal=wave.causal,
            **lengths,
            **_settings(operator),
        )
        parts.append(lse)
    return torch.stack(parts)
