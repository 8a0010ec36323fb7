"""The device, and what a figure was measured on and with."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
import time

import torch

import provenance
from absorbed_mla.generation.cpu import enable_cpu_inference
from context_parallel_benchmark.arguments import dims_of
from context_parallel_benchmark.processes import Processes


class Machine:
    """One process on one device.

    Args:
        args: Of the command line.
        begin: ``time.monotonic()`` when the script began.

    Raises:
        ValueError: If a GPU is asked for and there is none.
    """

    def __init__(self, args: argparse.Namespace, begin: float) -> None:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU, and there is none; give --device cpu")
        # A world of one process, where nobody listens.
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        enable_cpu_inference()
        self._processes = Processes(args.seed, timeout=120.0)
        self._begin = begin
        self.device, self.on_gpu = self._processes.device, self._processes.on_gpu
        self.dtype = getattr(torch, args.dtype) if args.dtype else self._processes.dtype

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self._begin

    def clock(self) -> float:
        """Seconds, after everything that the device was given."""
        self._processes.synchronize()
        return time.perf_counter()

    def forget(self) -> None:
        """Give memory back, and begin to watch its peak anew."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Since :meth:`forget`; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else None

    def describe(self, args: argparse.Namespace) -> dict:
        """Device, versions, date, command line, and what the cases have in common."""
        versions = provenance.attention_versions(self.on_gpu) | provenance.versions(["flash-mla"])
        return {
            "date": provenance.today(),
            "command": shlex.join(["python", *sys.argv]),
            "commit": provenance.commit(),
            "device": torch.cuda.get_device_name() if self.on_gpu else provenance.processor(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "dims": {**dims_of(args), "heads": args.heads, "layers": args.num_layers},
            "versions": versions,
        }

    def leave(self) -> None:
        """Leave the process group."""
        self._processes.leave()
