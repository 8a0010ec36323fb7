"""FlashAttention-3's forward over the latent: its ``qv`` argument makes it the absorbed form.

A score is ``q . k + qv . v`` there: q and k are the rotary parts, v the latent, qv the absorbed
query. The operator is taken from the flash-attn-3 package, or from vLLM's build of the same source
where somebody has loaded it (``torch.ops.load_library``); neither has a backward for it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.backends.hopper import ENTRY as HOPPER
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.varlen import VarlenCall, varlen_calls
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

# kv_lora_rank and rope width that its kernels with qv are compiled for.
_KV_LORA_RANKS = (256, 512)
_ROPE = 64
# The package's operators, and those of vLLM's build (vLLM itself is not imported for them).
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


class FlashAttention3Backend:
    """Forward by FlashAttention-3, backward by the backend ``hopper``."""

    name = "flash_attention_3"
    summary = "the flash-attn-3 package, Hopper, widths 256 or 512 and 64; backward of `hopper`"
    forms = ("absorbed",)
    # Tested but not timed here: the forward rate is what others measured.
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (600.0, 410.0)}
    searches_max_logits = False
    reads_device_spans = False

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        if request.max_logits:
            return (
                "it does not return the largest scores (qk_clip, log_max_attention_logit), which "
                "'hopper' does at no cost"
            )
        c, rope = request.value_width, request.key_width - request.value_width
        if request.form == "absorbed" and not (c in _KV_LORA_RANKS and rope == _ROPE):
            return (
                f"widths {c} (latent) and {rope} (rope) are not among {_KV_LORA_RANKS} and {_ROPE}"
            )
        reason = HOPPER.why_not(request)
        if reason:
            return f"{reason} (as 'hopper', which computes its backward)"
        return why_not_installed()

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the query.

        Rows of the keys between sequences must be finite: they are multiplied by zero.
        """
        tokens, batch, heads, _ = inputs.q_content.shape
        every_query = rules.spans.cover(tokens)
        make = torch.empty if every_query else torch.zeros
        q_content = inputs.q_content
        out = make(q_content.shape, dtype=q_content.dtype, device=q_content.device)
        # [B, N, S], as the kernel writes it.
        lse = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q_content.device)
        if not every_query:
            lse.fill_(-torch.inf)
        for call in varlen_calls(rules.spans, batch == 1):
            call.write_queries(lse, _forward(call, inputs, rules.scale, out))
        return AttentionOutput(out, lse.permute(2, 0, 1))

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See the backend ``hopper``."""
        return HOPPER.backward(grad, output, inputs, rules)


def why_not_installed() -> str | None:
    """Why there is no operator of FlashAttention-3 to call, or None."""
    try:
        operator = _operator()
    # The import can fail in any way; other backends still run.
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
        Exception: Anything that importing the package raises, if no operator is loaded yet.
    """
    for name in _NAMESPACES:
        if hasattr(getattr(torch.ops, name), "fwd"):
            return getattr(torch.ops, name).fwd.default
    importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3.fwd.default


@functools.cache
def _settings(operator) -> dict[str, object]:
    """The operator's other arguments, the same in every call; None for those not used."""
    names = (argument.name for argument in operator._schema.arguments)
    return {name: _FIXED.get(name) for name in names if name not in _USED}


def _forward(call: VarlenCall, inputs: AttentionInputs, scale: float, out: Tensor) -> Tensor:
    """Attention for the queries of ``call``: writes their rows of ``out``, returns LSE [B, N, S].

    Every entry of the batch is a call with cu_seqlens: vLLM's build has no kernels without them.
    """
    q_content, q_rope, latent, k_rope, _ = inputs
    queries = (x[call.queries] for x in (q_content, q_rope, out))
    keys = (x[call.keys] for x in (k_rope.unsqueeze(2), latent))
    operator = _operator()
    lengths = dict(zip(_LENGTHS, (*call.starts(out.device), *call.longest)))
    parts = []
    for q_v, q, rows, k, v in zip(*(x.unbind(1) for x in (*queries, *keys))):
        _, lse, *_ = operator(
            q=q,
            k=k,
            v=v,
            q_v=q_v,
            out=rows,
            softmax_scale=scale,
            is_causal=call.causal,
            **lengths,
            **_settings(operator),
        )
        parts.append(lse)
    return torch.stack(parts)


ENTRY = FlashAttention3Backend()
