"""States of the random number generators, for exact resumption."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject


def rng_entry() -> ShardedObject:
    """This rank's generator states as an entry of a distributed checkpoint."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return ShardedObject("rng_state", _states(), (world,), (rank,))


def restore_rng(states: dict) -> None:
    """Put the generators where they were when ``states`` was saved."""
    version, words, position, has_gauss, cached = states["numpy"]
    words = words.numpy().astype(np.uint32)
    np.random.set_state((version, words, position, has_gauss, cached))
    version, words, cached = states["python"]
    random.setstate((version, tuple(words), cached))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tracker"])


def _states() -> dict:
    """States in types that ``torch.load(weights_only=True)`` reads."""
    version, words, position, has_gauss, cached = np.random.get_state()
    numpy_state = (version, torch.from_numpy(words.astype(np.int64)), position, has_gauss, cached)
    python_version, python_words, python_cached = random.getstate()
    return {
        "numpy": numpy_state,
        "python": (python_version, list(python_words), python_cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
