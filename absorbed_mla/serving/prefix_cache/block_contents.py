"""Contents of KV blocks: copies them from an engine's cache to the CPU, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from torch import Tensor

from absorbed_mla.inference.kv_offload.context import OffloadingContext
from absorbed_mla.serving.prefix_cache.block_file import BlockLayout, Views, bytes_of, require_files

# Of the blocks that are read together on their way to the device.
_STAGED_BYTES = 2**26


class BlockMemory:
    """Reads and writes blocks of a cache: latents of this rank's layers, and index keys of DSA.

    Args:
        context: Of a model without layers of other kinds.

    Attributes:
        together: Blocks that may be read together.

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
        self.together = max(1, _STAGED_BYTES // self.layout.num_bytes)
        # [together, layers, block_size, width] by name, pinned; made when it is needed.
        self._staging: dict[str, Tensor] = {}

    @property
    def layout(self) -> BlockLayout:
        """Shapes and dtype of one block's tensors."""
        shapes = {n: (len(t), *t.shape[2:]) for n, t in self._tensors().items()}
        return BlockLayout(shapes, self._context.params_dtype)

    def read(self, blocks: Sequence[int]) -> dict[str, Tensor]:
        """Copies of blocks on the CPU, [blocks, *shape] by name; waits for the device."""
        if isinstance(self._context, OffloadingContext):
            tiers = self._context.tiers
            return {"latents": torch.stack([tiers.read_block(block) for block in blocks])}
        index = torch.tensor(blocks, dtype=torch.long)
        return {
            name: tensor[:, index.to(tensor.device)].transpose(0, 1).contiguous().cpu()
            for name, tensor in self._tensors().items()
        }

    def targets(self, blocks: Sequence[int]) -> list[list[Views]]:
        """Staging memory on the CPU, to be filled with at most ``together`` blocks' tensors.

        That is where blocks in host memory are; the others' content goes on by :meth:`arrived`.
        """
        latents = self._context.memory_buffer
        if latents.is_cuda:  # it may still read the staging memory, or move blocks
            torch.cuda.current_stream(latents.device).synchronize()
        staging, places = self._staged(), self._places(blocks)
        found: list[list[Views]] = []
        for block, place in zip(blocks, places):
            if place is None:
                found.append([[*map(bytes_of, self._context.tiers.host_block(block))]])
            else:
                found.append([[bytes_of(tensor[place])] for tensor in staging.values()])
        return found

    def arrived(self, blocks: Sequence[int], count: int) -> None:
        """Copy the first ``count`` of these blocks, whose targets are filled, to the cache."""
        filled = list(zip(blocks, self._places(blocks)))[:count]
        here = [block for block, place in filled if place is not None]
        tiered = isinstance(self._context, OffloadingContext)
        if here:
            for name, tensor in self._tensors().items():
                contents = self._staging[name][: len(here)]
                contents = contents.to(tensor.device, non_blocking=True)
                slots = self._context.tiers.slots_of(here) if tiered else torch.tensor(here)
                tensor[:, slots.to(tensor.device)] = contents.transpose(0, 1)
        if tiered:
            self._context.tiers.filled(blocks[:count])

    def release(self) -> None:
        """Give the staging memory back; it is made again when it is needed."""
        latents = self._context.memory_buffer
        if self._staging and latents is not None and latents.is_cuda:
            torch.cuda.current_stream(latents.device).synchronize()
        self._staging = {}

    def _places(self, blocks: Sequence[int]) -> list[int | None]:
        """Places in the staging memory; None for blocks in host memory."""
        if not isinstance(self._context, OffloadingContext):
            return list(range(len(blocks)))
        tiers, found, used = self._context.tiers, [], 0
        for block in blocks:
            far = tiers.host_block(block) is not None
            found.append(None if far else used)
            used += not far
        return found

    def _staged(self) -> dict[str, Tensor]:
        if not self._staging:
            pinned = self._context.memory_buffer.is_cuda
            layout = self.layout
            self._staging = {
                name: torch.empty((self.together, *shape), dtype=layout.dtype, pin_memory=pinned)
                for name, shape in layout.shapes.items()
            }
        return self._staging

    def _tensors(self) -> dict[str, Tensor]:
        """[layers, blocks, block_size, width] by name, on the device."""
        tensors = {"latents": self._context.memory_buffer}
        if hasattr(self._context, "index_keys"):
            tensors["index_keys"] = self._context.index_keys
        return tensors
