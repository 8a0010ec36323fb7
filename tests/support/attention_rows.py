"""What scripts/bench_attention.py might have measured, and arguments for a CPU."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from attention_benchmark.cases import CoreCase, LayerCase
from attention_benchmark.row import Row, Times
from context_parallel_benchmark.arguments import DIMS

ENVIRONMENT = {
    "date": "2026-01-01",
    "command": "python bench_attention.py",
    "commit": "abc",
    "device": "a device",
    "dtype": "bfloat16",
    "dims": DIMS,
    "rope_type": "rope",
    "form": "auto",
    "backend": "auto",
    "versions": {"torch": "2"},
    "ceilings": {"matmul_tflops": 700.0, "copy_tbps": 4.0},
}


def times(seconds: float) -> Times:
    return Times(seconds, seconds / 2, 2 * seconds, 3)


MEGATRON = Row(
    case=LayerCase("megatron", True, 128, 8192, "thd"),
    forward=times(0.01),
    backward=times(0.03),
    step=times(0.04),
    kept_bytes=1000 * 2**20,
    peak_bytes=2000 * 2**20,
)
OURS = dataclasses.replace(
    MEGATRON,
    case=LayerCase("ours", True, 128, 8192, "thd"),
    step=times(0.038),
    kept_bytes=250 * 2**20,
    ran="expanded, cudnn",
)
CORE = Row(
    case=CoreCase("torch, cudnn", "expanded", 16, 8192),
    forward=times(0.001),
    backward=times(0.002),
    step=times(0.003),
)
REFUSED = Row(case=CoreCase("torch, flash", "absorbed", 16, 8192), error="too wide\nfor flash")
ROWS = [MEGATRON, OURS, CORE, REFUSED]
# Options for a CPU.
TINY = ["--device", "cpu", "--form", "expanded", "--heads", "2", "--seq-lens", "48"]
TINY += ["--seconds-per-row", "0.01", "--hidden-size", "32", "--q-lora-rank", "16"]
TINY += ["--kv-lora-rank", "32", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8"]
TINY += ["--v-head-dim", "16"]
