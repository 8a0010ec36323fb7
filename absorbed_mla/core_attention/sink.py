"""Attention sinks: a logit of each head that takes part in the softmax and has no value.

Megatron's ``softmax_type``: ``"learnable"`` trains the logits (gpt-oss, arXiv:2508.10925),
``"off-by-one"`` leaves them 0. With s, the LSE over the keys and the output over them, ::

    lse' = log(exp(lse) + exp(s)),   out' = out exp(lse - lse')

and a backend's backward, given out' and lse', computes exp(score - lse'), which are the
probabilities beside the sink, and delta = out' . dout', so the gradients of query and keys are
right as they stand. That of s is -exp(s - lse') delta. The kernels need not know of it; where
one call sees all keys, a backend with ``sinks`` adds it itself, which saves a pass over the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.core_attention.merge import merge_into
from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
from absorbed_mla.dims import MLADims

# As Megatron's core attention names it in checkpoints.
NAME = "softmax_offset"
# Elements of the output at a time whose products are held.
_CHUNK = 2**24


def add_softmax_offset(
    module: nn.Module, config: MLATransformerConfig, dims: MLADims, tp_group: dist.ProcessGroup
) -> None:
    """Give a core attention its logits ``softmax_offset`` [N] of this rank's heads, or None.

    They have Megatron's dtype, that of the parameters, and are used in fp32 (fp64).
    """
    if config.softmax_type == "vanilla":
        module.softmax_offset = None
        return
    if config.softmax_type == "off-by-one":
        zeros = torch.zeros(dims.num_heads_per_rank, dtype=config.params_dtype, device=_on(config))
        module.register_buffer(NAME, zeros, persistent=False)
        return
    whole = torch.empty(dims.num_heads, dtype=config.params_dtype, device=_on(config))
    if config.perform_initialization:
        # PyTorch's default generator has the same state on all tensor-parallel ranks.
        config.init_method(whole)
    own = nn.Parameter(whole.view(tp_group.size(), -1)[tp_group.rank()].clone())
    set_tensor_model_parallel_attributes(own, is_parallel=True, dim=0, stride=1)
    module.register_parameter(NAME, own)


def _on(config: MLATransformerConfig) -> str | int:
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output, in its own memory, and LSE beside the sink, which has a value of 0.

    Args:
        out: Attention over all keys, [..., N, V]; 0 for a token that sees none.
        lse: Over all keys, [..., N], fp32 (fp64); -inf for a token that sees none.
        sink: [N].
    """
    sink = sink.to(lse.dtype)
    if out.is_cuda and lse.dtype == torch.float32:
        # One pass over the output, where PyTorch's product of two dtypes takes four times as long.
        # Not over the LSE: several threads read it, and one writes.
        total = torch.empty_like(lse)
        values, old, new = (x if out.ndim == 4 else x.unsqueeze(1) for x in (out, lse, total))
        nothing = out.new_zeros(out.shape[-1]).expand_as(values)
        merge_into(values, new, (values, old), (nothing, sink.expand_as(old)))
        return out, total
    # Not sigmoid, nor logaddexp: on a CPU their bits depend on a number's place in the tensor.
    share = 1 / (1 + torch.exp(sink - lse))
    larger = torch.maximum(lse, sink)
    total = larger + (torch.exp(lse - larger) + torch.exp(sink - larger)).log()
    return out.mul_(share[..., None]), total


def sink_gradient(
    grad: OutputGradient, output: AttentionOutput, sink: Tensor, of_heads: Sequence[Tensor] = ()
) -> Tensor:
    """Gradient of the sink [N], in its dtype, given ``output`` beside it and that one's gradient.

    Of the tokens of this rank: context-parallel ranks sum it as any parameter's. Where the backend
    has found it, it is in ``of_heads``, see ``Sink.gradients``.
    """
    if of_heads:
        return torch.cat(tuple(of_heads)).to(sink.dtype)
    out, lse = output
    width = out.shape[-1]
    if out.is_cuda and lse.dtype == torch.float32 and width & (width - 1) == 0:
        # Loaded where it runs: elsewhere the package does without Triton.
        from absorbed_mla.kernels.hopper.multi_head_backward_rows import starts

        *_, found = starts(grad.out, grad.lse, out, lse, 1.0, sink.detach())
        return found.to(sink.dtype)
    of_tokens = torch.exp(sink.to(lse.dtype) - lse) * _delta(grad, output)
    # A head's sum does not depend on how many heads a rank has.
    return -of_tokens.flatten(0, 1).t().contiguous().sum(-1).to(sink.dtype)


def _delta(grad: OutputGradient, output: AttentionOutput) -> Tensor:
    """The product out' . dout' less the LSE's gradient, [S, B, N]."""
    out, lse = output
    delta = torch.empty_like(lse)
    rows = max(1, _CHUNK // max(1, out[:1].numel()))
    for first in range(0, len(out), rows):
        part = slice(first, first + rows)
        delta[part] = (out[part].to(lse.dtype) * grad.out[part]).sum(-1)
    return delta if grad.lse is None else delta - grad.lse
