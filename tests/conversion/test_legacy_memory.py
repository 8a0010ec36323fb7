"""A rank's file may be far larger than memory: what is resident follows the largest tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MB = 1 << 20
# Writes and reads files of 239 MB, and prints by how much either made the process grow.
SCRIPT = """
import sys
from pathlib import Path

import torch
from tests.conversion.legacy_support import write_lazy
from tests.conversion.peak_memory import PeakMemory
from tests.conversion.support import tiny_config
from checkpoint_conversion.formats.legacy import LegacyCheckpoint
from checkpoint_conversion.lazy_tensor import LazyTensor, ReadSession
from checkpoint_conversion.mapping import hugging_face_shapes

def lazy(name, shape):
    values = LazyTensor(shape, torch.bfloat16, lambda session: torch.ones(shape).bfloat16(),
                        frozenset({name}), 0)
    return LazyTensor(shape, torch.bfloat16, values.load, values.leaves, 3 * values.nbytes)

def there_and_back(folder, **dimensions):
    config = tiny_config(q_lora_rank=512, kv_lora_rank=256, n_routed_experts=None, **dimensions)
    tensors = {name: lazy(name, shape) for name, shape in hugging_face_shapes(config).items()}
    memory = PeakMemory()
    write_lazy(folder, config, tensors, tensor_parallel=2)
    written, memory = memory.growth, PeakMemory()
    for tensor in LegacyCheckpoint(folder).hugging_face_tensors().values():
        with ReadSession() as session:
            assert tensor.load(session).float().mean() == 1
    return written, memory.growth

there_and_back(Path(sys.argv[1], "small"), num_hidden_layers=1)
large = dict(num_hidden_layers=9, hidden_size=1024, intermediate_size=8192, vocab_size=4096)
print(*there_and_back(Path(sys.argv[1], "large"), **large))
"""


def test_memory_follows_the_largest_tensor(tmp_path):
    """Not the file: that would not fit on the machines this is for."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    # A fixed threshold, so that the C library gives freed blocks back: else what it keeps for later
    # counts too, and differs by tens of MB from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written, read = (int(number) for number in done.stdout.split())
    sizes = [path.stat().st_size for path in (tmp_path / "large").rglob("*.pt")]
    assert len(sizes) == 2
    assert min(sizes) > 230 * MB
    # The largest target tensor has 16 MB; here its sources are made of several times their size.
    assert written < 120 * MB, f"{written / MB:.0f} MB"
    assert read < 60 * MB, f"{read / MB:.0f} MB"
