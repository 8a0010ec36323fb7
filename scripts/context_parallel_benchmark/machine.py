"""What a figure was measured on and with."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from context_parallel_benchmark.arguments import DIMS
from context_parallel_benchmark.processes import Processes

PACKAGES = ("torch", "megatron-core", "transformer-engine-torch", "triton")


def describe(args: argparse.Namespace, processes: Processes) -> dict:
    """Device, versions, date, command line, and what the cases have in common."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["torchrun", f"--nproc-per-node={processes.size}", *sys.argv]),
        "commit": _commit(),
        "device": torch.cuda.get_device_name() if processes.on_gpu else _processor(),
        "processes": processes.size,
        "backend": torch.distributed.get_backend(),
        "dtype": str(processes.dtype).removeprefix("torch."),
        "dims": {name: getattr(args, name.replace("-", "_")) for name in DIMS},
        "rope_type": args.rope_type,
        "versions": _versions(processes.on_gpu),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "NVTE_"))},
    }


def _versions(on_gpu: bool) -> dict[str, str]:
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    if on_gpu:
        versions["cuda"] = torch.version.cuda or "unknown"
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _commit() -> str:
    """Of the checkout, or as the environment names it for a copy that is none."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    if not shutil.which("git"):
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
