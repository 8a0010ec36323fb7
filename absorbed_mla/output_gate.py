"""The gate of the attention's output: a sigmoid of the layer's input, for each head or channel.

Source: "Gated Attention for Large Language Models" (arXiv:2505.06708), the gate behind the
attention (G1) with sigmoid.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.dims import MLADims
from absorbed_mla.once_differentiable import once_differentiable
from absorbed_mla.options import AbsorbedMLAOptions

# Rows of a weight that TransformerEngine multiplies in FP8 come in multiples of this.
_FP8_ROWS = 16


def gate_width(
    options: AbsorbedMLAOptions, config: MLATransformerConfig, dims: MLADims
) -> int | None:
    """Rows of ``linear_gate`` over all tensor-parallel ranks; None without a gate.

    Args:
        options: Read for ``attention_output_gate``.
        config: Likewise, a bool, and for ``gated_attention_proj_granularity`` (branch ``dev``; a
            config without that field means a head-wise gate).
        dims: Of the layer.

    Raises:
        ValueError: If the two contradict each other, or FP8 cannot multiply so few rows.
    """
    kind = options.attention_output_gate
    if getattr(config, "attention_output_gate", False):
        of_config = getattr(config, "gated_attention_proj_granularity", "headwise")
        if kind not in (None, of_config):
            raise ValueError(
                f"attention_output_gate=True in the config is a gate {of_config!r}, got "
                f"attention_output_gate={kind!r} in the options; set one of them"
            )
        kind = of_config
    if kind is None:
        return None
    width_of_head = {"headwise": 1, "elementwise": dims.v_head_dim}[kind]
    rows = dims.num_heads_per_rank * width_of_head
    if config.fp8 and rows % _FP8_ROWS:
        raise ValueError(
            f"attention_output_gate={kind!r} with fp8={config.fp8!r} needs a multiple of "
            f"{_FP8_ROWS} rows of linear_gate on every tensor-parallel rank, got {rows}"
        )
    return dims.num_heads * width_of_head


def gated(core_out: Tensor, logits: Tensor) -> Tensor:
    """The output of the attention times the sigmoid of ``logits``.

    Computed in fp32 (fp64 for fp64) and rounded once; backward keeps the two arguments.

    Args:
        core_out: [S, B, N * v].
        logits: Output of ``linear_gate``, [S, B, N] or [S, B, N * v].

    Returns:
        [S, B, N * v] in the dtype of ``core_out``.
    """
    return _Gated.apply(core_out, logits)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, core_out: Tensor, logits: Tensor) -> Tensor:
        ctx.save_for_backward(core_out, logits)
        if _by_kernel(core_out, logits):
            # Loaded where it runs: elsewhere the package does without Triton.
            from absorbed_mla.kernels.output_gate import gate_forward

            return gate_forward(core_out, logits)
        out = _by_gate(core_out, logits) * _sigmoid(logits)
        return out.to(core_out.dtype).view(core_out.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        core_out, logits = ctx.saved_tensors
        if _by_kernel(core_out, logits):
            from absorbed_mla.kernels.output_gate import gate_backward

            return gate_backward(grad, core_out, logits)
        gate, grad = _sigmoid(logits), _by_gate(grad, logits)
        # The gate's dtype is the wider one, in which products are computed.
        d_gate = (grad.to(gate.dtype) * _by_gate(core_out, logits)).sum(-1, keepdim=True)
        d_logits = (d_gate * gate * (1 - gate)).squeeze(-1)
        d_core = (grad * gate).to(core_out.dtype).view(core_out.shape)
        return d_core, d_logits.to(logits.dtype)


def _by_kernel(*tensors: Tensor) -> bool:
    return all(x.is_cuda and x.dtype != torch.float64 for x in tensors)


def _sigmoid(logits: Tensor) -> Tensor:
    """In fp32 (fp64), with an axis for the channels of a gate."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid().unsqueeze(-1)


def _by_gate(x: Tensor, logits: Tensor) -> Tensor:
    """``x`` [S, B, N * v] with its channels by gate, [*logits.shape, channels of a gate]."""
    return x.unflatten(-1, (logits.shape[-1], x.shape[-1] // logits.shape[-1]))
