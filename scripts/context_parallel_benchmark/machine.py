"""What a figure was measured on and with."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

import torch

import provenance
from context_parallel_benchmark.arguments import dims_of
from context_parallel_benchmark.processes import Processes


def describe(args: argparse.Namespace, processes: Processes) -> dict:
    """Device, versions, date, command line, and what the cases have in common."""
    return {
        "date": provenance.today(),
        "command": shlex.join(["torchrun", f"--nproc-per-node={processes.size}", *sys.argv]),
        "commit": provenance.commit(),
        "device": torch.cuda.get_device_name() if processes.on_gpu else provenance.processor(),
        "processes": processes.size,
        "backend": torch.distributed.get_backend(),
        "dtype": str(processes.dtype).removeprefix("torch."),
        "dims": dims_of(args),
        "rope_type": args.rope_type,
        "versions": _versions(processes.on_gpu),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "NVTE_"))},
    }


def _versions(on_gpu: bool) -> dict[str, str]:
    found = provenance.attention_versions(on_gpu)
    if on_gpu:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
