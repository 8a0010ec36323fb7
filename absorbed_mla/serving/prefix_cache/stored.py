"""Megatron's prefix cache, extended by the blocks of a folder.

A block that Megatron evicts, and every block that is cached when the engine stops, is written to
the folder. Before a request is scheduled, the blocks of its beginning that the prefix cache lacks
are read into free blocks of the context and registered there, as if a request had left them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.megatron_engine.attributes import find_cached_blocks
from absorbed_mla.serving.megatron_engine.names import CHECK_AVAILABILITY, DEREGISTER
from absorbed_mla.serving.model_ranks import Replicas, max_of
from absorbed_mla.serving.prefix_cache.block_contents import BlockMemory
from absorbed_mla.serving.prefix_cache.fingerprint import fingerprint
from absorbed_mla.serving.prefix_cache.folder import PrefixFolder


class StoredPrefixes:
    """The folder of one engine; collective over the ranks that hold the model together.

    Latents are the same on all tensor-parallel ranks: the first one of each pipeline stage writes
    its stage's files, and all of the stage read them. Ranks agree on what was found, because each
    of them schedules by itself.

    Args:
        context: The engine's, with a prefix cache under the LRU policy.
        root: ``prefix_cache_dir``.
        limit: ``prefix_cache_bytes``.

    Attributes:
        blocks_read: Blocks that came from the folder since it was opened.

    Raises:
        ValueError: If the folder cannot be made, its bound is less than a block, or the context's
            blocks cannot be kept in files.
    """

    def __init__(
        self, model: GPTModel, context: DynamicInferenceContext, root: Path, limit: int
    ) -> None:
        self._model, self._context, self._root, self._limit = model, context, root, limit
        self._memory = BlockMemory(context)
        block = self._memory.layout.num_bytes
        if limit < block:
            raise ValueError(f"prefix_cache_bytes must be at least a block's {block}, got {limit}")
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"prefix_cache_dir must be a folder that can be written, got {root}: {error}"
            ) from error
        self._writes = parallel_state.get_tensor_model_parallel_rank() == 0
        self._folder: PrefixFolder | None = None
        # The request that the folder was asked for last; one that waits is checked in every step.
        self._asked: DynamicInferenceRequest | None = None
        self.blocks_read = 0
        self._follow(context)

    def _follow(self, context: DynamicInferenceContext) -> None:
        """Be called when Megatron evicts blocks, and before it schedules a request."""
        allocator = context.kv_block_allocator
        evict, check = DEREGISTER.of(allocator), CHECK_AVAILABILITY.of(context)

        def save_and_evict(blocks: Tensor) -> None:
            # Megatron evicts the last block of a text first.
            self._save(blocks.tolist()[::-1])
            evict(blocks)

        def load_and_check(request: DynamicInferenceRequest) -> tuple[bool, bool, bool]:
            found = check(request)
            may_run, _, has_memory = found
            if may_run and has_memory and self._load(request):
                found = check(request)
            return found

        DEREGISTER.replace(allocator, save_and_evict)
        CHECK_AVAILABILITY.replace(context, load_and_check)

    def open_again(self) -> None:
        """Use the folder of the weights of the moment; no block may be cached."""
        name = fingerprint(self._model)
        if self._folder is not None:
            self._folder.close()
        self._asked = None
        self._folder = PrefixFolder(self._root, name, self._memory.layout, self._limit)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Use the folder in between, with the weights of the beginning.

        At the end the blocks of ended requests are written; those of others may be unfinished.
        """
        self.open_again()
        self.blocks_read = 0
        try:
            yield
            allocator = self._context.kv_block_allocator
            cached = allocator.kv_hash_to_block_id.values()
            self._save([b for b in cached if not allocator.block_ref_counts[b]])
        finally:
            folder, self._folder = self._folder, None
            folder.close()
            self._memory.release()

    def _save(self, blocks: Sequence[int]) -> None:
        """Write the blocks that are in the prefix cache and not in the folder.

        Args:
            blocks: Each after the one before it in its text, so that files hold runs of texts.
        """
        folder, allocator = self._folder, self._context.kv_block_allocator
        if folder is None or not self._writes:
            return
        known = allocator.kv_hash_to_block_id
        hashes = allocator.block_hashes[blocks].tolist()
        cached = [pair for pair in zip(hashes, blocks) if known.get(pair[0]) == pair[1]]
        folder.leading([])
        new = [pair for pair in cached if not folder.has(pair[0])]
        folder.touch([one for one, _ in cached if folder.has(one)])
        size = folder.blocks_per_file
        # A file without the ones before it is of no use: it is the older one, deleted first.
        for first in reversed(range(0, len(new), size)):
            hashes, part = zip(*new[first : first + size])
            folder.write(hashes, self._memory.read(part))

    def _load(self, request: DynamicInferenceRequest) -> int:
        """Read the beginning of a request's prompt as far as the folder has it.

        Returns:
            Blocks added to the prefix cache.
        """
        folder, hashes = self._folder, request.precomputed_block_hashes
        if folder is None or request.finished_chunk_token_count or request is self._asked:
            return 0
        self._asked = request
        allocator = self._context.kv_block_allocator
        cached, _ = find_cached_blocks(self._context)(request, 0, len(hashes))
        missing = hashes[len(cached) :]
        count = _least(folder.leading(missing))
        if not count:
            return 0
        # As Megatron does: what is about to be used must not be evicted for the new blocks.
        held = torch.tensor(cached, dtype=torch.int32)
        allocator.block_ref_counts[held] += 1
        blocks = allocator.allocate_memory_blocks(count)
        allocator.block_ref_counts[held] -= 1
        if blocks is None:
            return 0
        blocks = blocks.clone()  # a view of the allocator's pool
        done = _least(self._read(folder, missing[:count], blocks.tolist()))
        allocator.release_memory_blocks(blocks[done:])
        parents = [*hashes[len(cached) - 1 : len(cached)], *missing] if cached else [0, *missing]
        allocator.register_kv_block_hashes(blocks[:done].tolist(), missing[:done], parents[:done])
        allocator.release_memory_blocks(blocks[:done])  # they stay in the prefix cache
        folder.touch(hashes[: len(cached) + done])
        self.blocks_read += done
        return done

    def _read(self, folder: PrefixFolder, hashes: Sequence[int], blocks: Sequence[int]) -> int:
        """Fill blocks of the context from files; how many, up to the first that is refused."""
        done, together = 0, self._memory.together
        for first in range(0, len(blocks), together):
            part = blocks[first : first + together]
            targets = self._memory.targets(part)
            found = folder.read(hashes[first : first + together], targets)
            self._memory.arrived(part, found)
            done += found
            if found < len(part):
                break
        return done


def stored_prefixes(
    model: GPTModel, options: EngineOptions, context: DynamicInferenceContext, replicas: Replicas
) -> StoredPrefixes | None:
    """As the options ask for; None if they ask for none.

    Raises:
        ValueError: As :class:`StoredPrefixes`, or if data-parallel ranks share experts.
    """
    if options.prefix_cache_dir is None:
        return None
    if replicas.several:
        raise ValueError(
            "prefix_cache_dir must be None where data-parallel ranks share experts, got "
            f"{options.prefix_cache_dir!r}: they would have to stop together"
        )
    root = Path(options.prefix_cache_dir)
    return StoredPrefixes(model, context, root, options.prefix_cache_bytes)


def _least(count: int) -> int:
    """The least of the counts of all ranks that hold the model together."""
    return -max_of(-count, parallel_state.get_model_parallel_group())
