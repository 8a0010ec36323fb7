"""Checks that a recipe has done what its name says; what they find goes into the report."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from torch import nn


def offloaded(chunks: Sequence[nn.Module]) -> str:
    """Bytes that were sent to the host, of every module that was asked for.

    Raises:
        RuntimeError: Naming the modules that sent none.
    """
    sent = PipelineOffloadManager.get_instance().offload_summary_bytes
    idle = [name for name in chunks[0].config.offload_modules if not sent.get(name)]
    if idle:
        raise RuntimeError(f"nothing was offloaded of {', '.join(idle)}; of others: {sent}")
    return ", ".join(f"{name} {count / 2**20:.2f} MiB" for name, count in sent.items())


def layers_offloaded(chunks: Sequence[nn.Module]) -> str:
    """What TransformerEngine has sent to the host of all layers.

    Raises:
        RuntimeError: If it was nothing.
    """
    context = chunks[0].decoder.offload_context
    sent = context.offload_synchronizer.get_offloaded_total_size_mb()
    if not sent:
        raise RuntimeError("no layer was offloaded")
    return f"{sent:.2f} MiB"


def fused(chunks: Sequence[nn.Module]) -> str:
    """How many layers accumulate their weight gradients themselves.

    Raises:
        RuntimeError: If none does.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    found = sum(bool(getattr(m, "fuse_wgrad_accumulation", False)) for m in modules)
    if not found:
        raise RuntimeError("no layer accumulates weight gradients itself")
    return f"{found} layers accumulate themselves"
