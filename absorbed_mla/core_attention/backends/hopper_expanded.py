"""This package's Gluon kernels for the expanded form on Hopper (compute capability 9.0)."""

from __future__ import annotations

from collections.abc import Mapping

from absorbed_mla.core_attention.backend import AttentionRequest, why_not_fused
from absorbed_mla.core_attention.backends.cudnn import ENTRY as CUDNN
from absorbed_mla.core_attention.backends.cudnn import dense_blocks
from absorbed_mla.core_attention.latent_kernels import (
    key_tile_table,
    query_tile_table,
    why_not_device,
    why_not_triton_version,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.kernels import operators

# Queries in a tile of the forward kernel, keys in one of the backward.
_QUERIES = _KEYS = 128
_KEY_WIDTHS = (96, 128, 192)
_VALUE_WIDTHS = (64, 128)


class HopperExpandedBackend:
    """One launch for any spans, of a forward kernel and of a backward one, which adds by atomics.

    One dense block goes to cuDNN's backward, which is 1 to 3 % faster there, and one launch.
    """

    name = "hopper_expanded"
    summary = "this package's kernels for Hopper, any layout in one launch; not deterministic"
    forms = ("expanded",)
    # Measured on an H100 beside cuDNN, in whose proportion they stand to its rates here.
    rates: Mapping[str, tuple[float, float]] = {"NVIDIA H200": (700.0, 450.0)}
    searches_max_logits = False
    reads_device_spans = True
    adds_query_gradients = True
    windows = True
    sinks = True

    def why_not(self, request: AttentionRequest) -> str | None:
        """See ``AttentionBackend``."""
        reason = why_not_fused(request)
        if reason is None and request.deterministic:
            reason = CUDNN.why_not(request)
        key, value = request.key_width, request.value_width
        if reason is None and not (key in _KEY_WIDTHS and value in _VALUE_WIDTHS):
            known = f"{_KEY_WIDTHS} and {_VALUE_WIDTHS}"
            reason = f"widths {key} (keys) and {value} (values) are not among {known}"
        reason = reason or why_not_device(request.device, lambda found: found == (9, 0), "9.0")
        return reason or why_not_triton_version(below=(3, 8))

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``reference_forward``; the output has the dtype of the inputs."""
        q, k, v = inputs.as_multi_head()
        record = rules.max_logits is not None
        tiles = query_tile_table(rules.spans, _QUERIES, len(q), q.device, rules.window)
        operands = q, k, v, tiles, rules.scale, record, rules.window, rules.sink_of(q.shape[2])
        out, lse, largest = operators.multi_head_attention_forward(*operands)
        if record:
            rules.record(largest)
        return AttentionOutput(out, lse)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``reference_backward``; gradients have the dtype of the inputs."""
        dense = rules.window is None and len(dense_blocks(rules.spans)) == 1
        if dense and grad.lse is None:
            return CUDNN.backward(grad, output, inputs, rules)
        q, k, v = inputs.as_multi_head()
        tiles = key_tile_table(rules.spans, _KEYS, len(k), k.device, rules.window)
        saved = grad.out, grad.lse, output.out, output.lse, q, k, v
        given = *tiles, rules.scale, rules.window, rules.sink_of(q.shape[2])
        *grads, of_sink = operators.multi_head_attention_backward(*saved, *given)
        if rules.sink is not None:
            rules.sink.gradients.append(of_sink)
        return inputs.multi_head_gradient(*grads)


ENTRY = HopperExpandedBackend()
