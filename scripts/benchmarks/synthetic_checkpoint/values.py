"""Random values at the speed of memory, and the shards that hold them."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.synthetic_checkpoint.models import Stored
from benchmarks.synthetic_checkpoint.sizes import stored_bytes

# A prime, so that no row of a tensor repeats an earlier one at the same place.
BLOCK_VALUES = 4_194_301
STRIDE = 1_000_003


class Values:
    """One block of random values per role; each tensor starts at a place of its own in it.

    Args:
        tensors: All tensors, in order; tensor i starts at i * STRIDE.
    """

    def __init__(self, tensors: Iterable[Stored]) -> None:
        self._start = {t.name: i * STRIDE % BLOCK_VALUES for i, t in enumerate(tensors)}
        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(BLOCK_VALUES, generator=generator)
        self._blocks: dict[str, Tensor] = {}

    def make(self, tensor: Stored) -> Tensor:
        """The values of ``tensor``: the block again and again from the tensor's place on."""
        block = self._block(tensor.role)
        result = torch.empty(math.prod(tensor.shape), dtype=block.dtype)
        position = self._start[tensor.copy_of or tensor.name]
        written = 0
        while written < len(result):
            piece = block[position : position + len(result) - written]
            result[written : written + len(piece)] = piece
            written += len(piece)
            position = 0
        return result.view(tensor.shape)

    def _block(self, role: str) -> Tensor:
        if role not in self._blocks:
            normal = self._normal
            self._blocks[role] = {
                "weight": lambda: (0.02 * normal).bfloat16(),
                "norm": lambda: (1 + 0.02 * normal).bfloat16(),
                "bias": lambda: 0.1 * normal,
                # e4m3 ends at 448; a weight is its values times a scale of about 2e-4.
                "fp8": lambda: (100 * normal).clamp(-448, 448).to(torch.float8_e4m3fn),
                "scale": lambda: 2e-4 * (1 + 0.1 * normal.abs()),
            }[role]()
        return self._blocks[role]


def shards(tensors: Iterable[Stored], limit: int) -> list[list[Stored]]:
    """Tensors in order, grouped so that no shard but one of a single tensor is above ``limit``."""
    result: list[list[Stored]] = []
    used = 0
    for tensor in tensors:
        nbytes = stored_bytes(tensor)
        if not result or used + nbytes > limit:
            result.append([])
            used = 0
        result[-1].append(tensor)
        used += nbytes
    return result


def write_checkpoint(
    folder: Path,
    config: dict,
    shard_list: list[list[Stored]],
    values: Values,
    progress: Callable[[str], None],
    processes: int = 1,
) -> None:
    """Write shards, index and config.json.

    Args:
        folder: Exists and is empty.
        config: The config.json.
        shard_list: From :func:`shards`.
        values: Makes the values.
        progress: Called with the name of every file that has been written.
        processes: That write, each with one shard in memory; forked, before anything uses a GPU.
    """
    names = [
        f"model-{number:05d}-of-{len(shard_list):05d}.safetensors"
        for number in range(1, len(shard_list) + 1)
    ]
    paths = [folder / name for name in names]
    with contextlib.ExitStack() as stack:
        written: Iterator[None] = map(_write_shard, repeat(values), shard_list, paths)
        if processes > 1:
            # Threads of PyTorch do not live on in a forked process.
            fork = multiprocessing.get_context("fork")
            pool = ProcessPoolExecutor(processes, fork, torch.set_num_threads, (1,))
            written = stack.enter_context(pool).map(_write_shard, repeat(values), shard_list, paths)
        for name, _ in zip(names, written, strict=True):
            progress(name)
    weight_map = {t.name: name for name, shard in zip(names, shard_list) for t in shard}
    total = sum(stored_bytes(t) for shard in shard_list for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)


def _write_shard(values: Values, shard: list[Stored], path: Path) -> None:
    save_file({t.name: values.make(t) for t in shard}, path, {"format": "pt"})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
