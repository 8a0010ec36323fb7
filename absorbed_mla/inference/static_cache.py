"""The latent cache in Megatron's ``StaticInferenceContext``: one batch that grows in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import CachePart, RowLengths


class StaticStep:
    """One forward of a batch whose requests all hold the same number of tokens.

    The context keeps, under the layer's number, the latents [max_sequence_length, max_batch_size,
    C + rope]: its own ``swap_key_value_dict`` reorders requests. A request is one block.

    Args:
        context: The host's; its ``sequence_len_offset`` and ``batch_size_offset`` say where the
            new tokens go.
        layer_number: Key of the layer in the context.
        kv: Latents of the new tokens, [S, B, C + rope].

    Raises:
        ValueError: If the new tokens do not fit into the context.
    """

    windowed = False

    def __init__(self, context: Any, layer_number: int, kv: Tensor) -> None:
        tokens, batch, _ = kv.shape
        self.offset, self.batch = int(context.sequence_len_offset), batch
        self.first = int(context.batch_size_offset)
        self.max_position = self.offset + tokens
        _require_fits("max_sequence_length", context.max_sequence_length, self.max_position)
        _require_fits("max_batch_size", context.max_batch_size, self.first + batch)
        memory = _memory(context, layer_number, kv)
        self.block_size = len(memory)
        self.memory = memory[:, self.first : self.first + batch]
        self.lengths = RowLengths((tokens,) * batch, (self.max_position,) * batch)
        table = torch.arange(batch, dtype=torch.int32, device=kv.device)[:, None]
        self.rows = Rows.of(self.lengths.queries, self.lengths.keys, table)

    def positions(self) -> Tensor | None:
        """See :class:`InferenceStep`."""
        if not self.offset and self.batch == 1:
            return None
        positions = torch.arange(self.offset, self.max_position, device=self.memory.device)
        return positions.repeat(self.batch)

    def pack(self, x: Tensor) -> Tensor:
        """See :class:`InferenceStep`."""
        return x.transpose(0, 1).reshape(-1, 1, x.shape[-1])

    def unpack(self, x: Tensor) -> Tensor:
        """See :class:`InferenceStep`."""
        return x.view(self.batch, -1, x.shape[-1]).transpose(0, 1)

    def write(self, kv: Tensor) -> None:
        """See :class:`InferenceStep`."""
        self.memory[self.offset : self.max_position] = self.unpack(kv)

    def parts(self) -> Iterator[CachePart]:
        """See :class:`InferenceStep`."""
        yield CachePart(self.memory.transpose(0, 1), self.rows)


def _require_fits(name: str, limit: int, needed: int) -> None:
    if needed > limit:
        raise ValueError(
            f"the inference context has {name}={limit}, but this forward needs {needed}; "
            f"make the context with a larger {name}"
        )


def _memory(context: Any, layer_number: int, kv: Tensor) -> Tensor:
    """The layer's latents, allocated on first use."""
    shape = (context.max_sequence_length, context.max_batch_size, kv.shape[-1])
    if layer_number not in context.key_value_memory_dict:
        memory = torch.empty(shape, dtype=kv.dtype, device=kv.device)
        # The host keeps a pair; latents need no values of their own.
        context.key_value_memory_dict[layer_number] = (memory, memory[..., :0])
    memory, _ = context.key_value_memory_dict[layer_number]
    if memory.shape[2:] != shape[2:] or memory.dtype != kv.dtype or memory.device != kv.device:
        raise ValueError(
            f"the inference context holds {memory.dtype} {tuple(memory.shape)} on {memory.device} "
            f"for layer {layer_number}, not this layer's latents {kv.dtype} {shape} on "
            f"{kv.device}; use one context per model"
        )
    return memory
