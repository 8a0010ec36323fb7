"""Megatron's communication buffers of inference, which training must not reuse."""

from __future__ import annotations

from megatron.core import parallel_state


def drop_inference_buffers() -> None:
    """Drop the buffers that were allocated in ``torch.inference_mode``; call it after generation.

    Megatron gathers tokens under sequence parallelism into a buffer that it only replaces by a
    larger one. Allocated in inference mode, it makes the next training forward raise "Inplace
    update to inference tensor".
    """
    buffers = parallel_state.get_global_memory_buffer().buffer
    for key in [key for key, tensor in buffers.items() if tensor.is_inference()]:
        del buffers[key]
