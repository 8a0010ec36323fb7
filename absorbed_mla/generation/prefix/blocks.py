"""The contents of a context's blocks: what a block file holds, and how it comes and goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from torch import Tensor

from absorbed_mla.generation.prefix.block_file import BlockLayout, require_files
from absorbed_mla.inference.tiered_context import TieredContext


class BlockMemory:
    """Latents of all layers of this rank, and index keys where layers have an indexer.

    Args:
        context: Of a model without layers of other kinds.

    Raises:
        ValueError: If what it holds cannot be kept in files.
    """

    def __init__(self, context: DynamicInferenceContext) -> None:
        if context.is_hybrid_model:
            raise ValueError(
                "prefix_cache_dir must be None for a hybrid model, whose other layers have states "
                "that are no blocks"
            )
        latents = context.memory_buffer
        require_files(latents.dtype)
        if latents.dtype != context.params_dtype:
            raise ValueError(
                "prefix_cache_dir keeps latents in the model's dtype "
                f"{context.params_dtype}, got a cache of {latents.dtype}"
            )
        self._context = context

    @property
    def layout(self) -> BlockLayout:
        """Of one block."""
        shapes = {n: (len(t), *t.shape[2:]) for n, t in self._tensors().items()}
        return BlockLayout(shapes, self._context.params_dtype)

    def read(self, blocks: Sequence[int]) -> list[dict[str, Tensor]]:
        """Copies of blocks on the CPU; waits for the device."""
        if isinstance(self._context, TieredContext):
            return [{"latents": self._context.tiers.read_block(block)} for block in blocks]
        index = torch.tensor(blocks, dtype=torch.long)
        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            chosen = tensor[:, index.to(tensor.device)].transpose(0, 1)
            found[name] = chosen.contiguous().cpu()
        return [{name: t[i] for name, t in found.items()} for i in range(len(blocks))]

    def write(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Set the contents of a block."""
        if isinstance(self._context, TieredContext):
            self._context.tiers.write_block(block, tensors["latents"])
            return
        for name, tensor in self._tensors().items():
            tensor[:, block] = tensors[name].to(tensor.device)

    def _tensors(self) -> dict[str, Tensor]:
        """[layers, blocks, block_size, width] by name."""
        tensors = {"latents": self._context.memory_buffer}
        if hasattr(self._context, "index_keys"):
            tensors["index_keys"] = self._context.index_keys
        return tensors
