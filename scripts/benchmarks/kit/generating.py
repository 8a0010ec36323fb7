"""Benchmarks whose models generate, also on a CPU."""

from __future__ import annotations

import argparse
import warnings

from benchmarks.kit import arguments
from benchmarks.kit.run import Benchmark


class GeneratingBenchmark(Benchmark):
    """Ready to build models, on one device or in torchrun's processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        arguments.use_device(args.device)
        warnings.filterwarnings("ignore")
        from absorbed_mla.serving.cpu_engine import enable_cpu_inference
        from benchmarks.kit.processes import Processes

        enable_cpu_inference()
        self.processes = Processes(args.seed)
