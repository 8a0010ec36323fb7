"""A rank's file may be far larger than memory: reading needs what the largest tensor needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from checkpoint_conversion.mapping import hugging_face_shapes
from tests.conversion.legacy_support import write_legacy
from tests.conversion.support import tiny_config

ROOT = Path(__file__).parents[2]
MB = 1 << 20
# Reads a small and a large checkpoint; prints by how much the large one made the process grow.
SCRIPT = """
import sys
from pathlib import Path

from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from tests.conversion.support import PeakMemory

def read(name):
    memory = PeakMemory()
    for tensor in LegacyCheckpoint(Path(sys.argv[1], name)).hugging_face_tensors().values():
        with ReadSession() as session:
            assert tensor.load(session).float().mean() == 1
    return memory.growth

read("small")
print(read("large"))
"""
LARGE = {"num_hidden_layers": 5, "hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 4096}


def write(folder: Path, **dimensions: int) -> None:
    config = tiny_config(q_lora_rank=512, kv_lora_rank=256, n_routed_experts=None, **dimensions)
    shapes = hugging_face_shapes(config)
    ones = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    write_legacy(folder, config, ones, tensor_parallel=2)


def test_memory_follows_the_largest_tensor(tmp_path):
    """Not the file: that would not fit on the machines this is for."""
    # A fixed threshold, so that the C library gives freed blocks back: else what it keeps for later
    # counts too, and differs by tens of MB from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    write(tmp_path / "small", num_hidden_layers=1)
    write(tmp_path / "large", **LARGE)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = [path.stat().st_size for path in (tmp_path / "large").rglob("*.pt")]
    assert len(sizes) == 2
    assert min(sizes) > 120 * MB
    # The largest tensor has 16 MB.
    assert int(done.stdout) < 60 * MB, f"{int(done.stdout) / MB:.0f} MB"
