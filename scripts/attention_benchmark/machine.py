"""The device, what a figure was measured on, and the order of the rows."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shlex
import time
from collections.abc import Callable

import torch

import provenance
from attention_benchmark.arguments import command_line
from attention_benchmark.cases import CoreCase, LayerCase, attention_flops
from attention_benchmark.core import measure_core
from attention_benchmark.layers import measure_layer
from attention_benchmark.row import Refused, Row, failed
from attention_benchmark.timing import ceilings
from context_parallel_benchmark.arguments import dims_of
from context_parallel_benchmark.processes import Processes


class Bench:
    """Measures one case after another, on one device.

    Args:
        args: Of the command line.
        device: ``"cuda"`` or ``"cpu"``.
        begin: ``time.monotonic()`` when the script began.
    """

    def __init__(self, args: argparse.Namespace, device: str, begin: float) -> None:
        # A world of one process, where nobody listens.
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "0")
        self.args = args
        self.begin = begin
        self.processes = Processes(args.seed, timeout=120.0)
        assert self.processes.device.type == device
        self._known: dict[tuple, tuple[float, float]] = {}

    def describe(self) -> dict:
        """Device, versions, date, command line, ceilings, and what the cases have in common."""
        on_gpu = self.processes.on_gpu
        return {
            "date": provenance.today(),
            "command": shlex.join(command_line()),
            "commit": provenance.commit(),
            "device": torch.cuda.get_device_name() if on_gpu else provenance.processor(),
            "dtype": str(self.processes.dtype).removeprefix("torch."),
            "dims": dims_of(self.args),
            "rope_type": self.args.rope_type,
            "form": self.args.form,
            "backend": self.args.backend,
            "versions": provenance.attention_versions(on_gpu),
            "ceilings": ceilings(on_gpu),
        }

    def measure(self, case: LayerCase | CoreCase) -> Row:
        """Measure one case; what it raises is in its row."""
        function: Callable = measure_layer if isinstance(case, LayerCase) else measure_core
        try:
            self._leave_out_if_late()
            self._leave_out_if_long(case)
            row = function(case, self.args, self.processes)
        except Exception as error:
            row = failed(case, error)
        # After the block that held the tensors of a failed case in its traceback.
        gc.collect()
        # It fails where a kernel's fault took the device away, which the next rows will say.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
        longest = row.step or row.forward
        if longest is not None:
            self._known[self._series(case)] = (self._cost(case), longest.median)
        return row

    def leave(self) -> None:
        """Leave the process group."""
        self.processes.leave()

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self.begin

    def _leave_out_if_late(self) -> None:
        if self.elapsed > self.args.time_limit:
            raise Refused(f"left out: {self.args.time_limit:g} s are over (--time-limit)")

    def _leave_out_if_long(self, case: LayerCase | CoreCase) -> None:
        known = self._known.get(self._series(case))
        if known is None:
            return
        expected = known[1] * self._cost(case) / known[0]
        if expected > self.args.longest_step:
            raise Refused(f"left out: a step would take about {expected:.0f} s (--longest-step)")

    def _cost(self, case: LayerCase | CoreCase) -> float:
        """What the time of cases of one series grows with, at most."""
        if isinstance(case, CoreCase):
            return sum(attention_flops(case, dims_of(self.args)))
        return case.heads * case.tokens**2

    def _series(self, case: LayerCase | CoreCase) -> tuple:
        if isinstance(case, CoreCase):
            return case.implementation, case.form
        return case.implementation, case.recompute, case.heads, case.layout
