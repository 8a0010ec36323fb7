"""Training under Megatron's CUDA graphs (``cuda_graph_impl``): config checks, autograd helpers.

A replay repeats kernels on the same memory and runs no Python: whatever the host decides or draws
in a step would stay as it was in the captured one. That is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

# Config field -> (what can be captured, why nothing else).
_CAPTURED: dict[str, tuple[object, str]] = {
    "attention_dropout": (0.0, "every step's seed is drawn on the host"),
    "qk_clip": (False, "the host resets the largest scores between steps"),
    "log_max_attention_logit": (False, "the host resets the largest scores between steps"),
    "experimental_attention_variant": (None, "sparse attention and KDA were not tried in graphs"),
    "context_parallel_size": (1, "exchanges between ranks were not tried in such graphs"),
    "fp8": (None, "FP8 was not tried in such graphs"),
    "fine_grained_activation_offloading": (False, "copies to the host were not tried in graphs"),
}


def captures_attention(config: MLATransformerConfig) -> bool:
    """Whether Megatron's graphs of training steps hold the attention: by ``cuda_graph_modules``."""
    if config.cuda_graph_impl == "none":
        return False
    modules = getattr(config, "cuda_graph_modules", None) or ()
    return not modules or any(getattr(one, "name", one) == "attn" for one in modules)


def refuse_uncapturable_config(config: MLATransformerConfig) -> None:
    """Refuse a config whose training steps cannot be replayed.

    Raises:
        ValueError: Naming the field, what it is, what can be captured, and how to train without.
    """
    graphs = f"cuda_graph_impl={config.cuda_graph_impl!r}"
    without = "set it so, or cuda_graph_impl='none' for training (Megatron's toggle_cuda_graphs)"
    for name, (accepted, reason) in _CAPTURED.items():
        value = getattr(config, name, accepted)
        if (value or None) != (accepted or None):
            raise ValueError(
                f"{graphs} captures training steps with {name}={accepted!r} only, got {value!r}: "
                f"{reason}; {without}"
            )
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    if config.cuda_graph_impl == "local" and "layernorm" in (recomputed or ()):
        raise ValueError(
            f"{graphs} captures training steps without 'layernorm' in recompute_modules only, got "
            f"{recomputed}: Megatron loses the gradients of norms that it recomputes in a graph; "
            f"{without}"
        )


def capturable_mask(
    config: MLATransformerConfig, attention_mask: Tensor | None, packed_seq_params: Any
) -> Tensor | None:
    """Check the arguments of a training step that is captured, or will be.

    Args:
        config: Read for ``cuda_graph_impl`` and what it captures.
        attention_mask: Of the attention's forward.
        packed_seq_params: Likewise.

    Returns:
        The mask for the attention. ``transformer_engine`` captures with a mask of Megatron's
        making and replays with another, neither of which hides more than a causal mask.

    Raises:
        ValueError: If config or arguments cannot be captured.
    """
    if not captures_attention(config):
        return attention_mask
    refuse_uncapturable_config(config)
    graphs = f"cuda_graph_impl={config.cuda_graph_impl!r}"
    if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
        raise ValueError(
            f"packed_seq_params must be None where {graphs} captures training steps: the host "
            "reads cu_seqlens, and a replay would keep the captured ones"
        )
    if config.cuda_graph_impl != "transformer_engine" or attention_mask is None:
        return attention_mask
    if is_graph_capturing():
        return None
    raise ValueError(
        f"attention_mask must be None where {graphs} captures training steps, got a tensor of "
        f"shape {tuple(attention_mask.shape)}: Megatron captures with a mask of its own"
    )


def attach_recomputed_parameters(
    recomputed: Sequence[nn.Module], config: MLATransformerConfig, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The inputs of a checkpoint that Megatron captures, tied to the parameters inside of it.

    ``cuda_graph_impl="local"`` adds to ``main_grad`` what the graph of autograd returns for its
    parameters. A ``CheckpointWithoutOutput`` hides those that it recomputes with, and leaves their
    gradients in ``grad``, where nobody looks (megatron-core 0.19.2, also in its own MLA).

    Args:
        recomputed: The layers inside of the checkpoint.
        config: Read for ``cuda_graph_impl``.
        inputs: Of the checkpoint.

    Returns:
        The inputs as they are, unless a graph is being captured.
    """
    if config.cuda_graph_impl != "local" or not is_graph_capturing():
        return inputs
    parameters = [p for layer in recomputed for p in layer.parameters() if p.requires_grad]
    return _GradientsOfRecomputation.apply(len(inputs), *inputs, *parameters)


class _GradientsOfRecomputation(torch.autograd.Function):
    """Returns its first ``count`` tensors; backward hands out ``grad`` of the others."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parameters = tensors[count:]
        return tensors[:count]

    @staticmethod
    def backward(ctx, *grads: Tensor):
        # The checkpoint's backward is over: it has given these gradients.
        found = [parameter.grad for parameter in ctx.parameters]
        for parameter in ctx.parameters:
            parameter.grad = None
        return None, *grads, *found


class SaveForBackward(torch.autograd.Function):
    """The identity, which saves its input for backward.

    For what may be the input of a captured layer and is saved by an operator of PyTorch:
    ``cuda_graph_impl="local"`` keeps the memory of such an input until backward is captured only if
    it has seen a function in Python save it, and otherwise gives it to the next layers.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        """Return ``x``."""
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Return ``grad``."""
        return grad
