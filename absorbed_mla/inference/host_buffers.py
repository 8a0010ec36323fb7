"""Buffers that Megatron keeps, and that generation may leave unusable for training."""

from __future__ import annotations

from megatron.core import parallel_state


def drop_inference_buffers() -> None:
    """Let training make its own buffers, where inference mode made larger ones.

    Megatron gathers tokens under sequence parallelism into a buffer that only ever grows. Grown in
    ``torch.inference_mode`` it is a tensor that autograd must not write to: the next training
    forward raises "Inplace update to inference tensor". To be called when generation is over.
    """
    buffers = parallel_state.get_global_memory_buffer().buffer
    for key in [key for key, tensor in buffers.items() if tensor.is_inference()]:
        del buffers[key]
