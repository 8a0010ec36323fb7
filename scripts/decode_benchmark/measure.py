"""Inputs on one device, and the time that attention over them takes."""

from __future__ import annotations

import argparse
import gc
import shlex
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import provenance
from absorbed_mla.inference.backend import PagedRequest, choose
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from attention_benchmark.arguments import command_line
from attention_benchmark.row import Refused
from attention_benchmark.timing import Repeated, ceilings
from decode_benchmark.cases import OURS, DecodeCase
from decode_benchmark.peers import FUNCTIONS, Inputs
from decode_benchmark.row import Row, failed

_PACKAGES = ("torch", "triton", "flash-mla", "flashinfer-python", "vllm")
# More than any L2 cache.
_FLUSHED_BYTES = 256 * 2**20


class Bench:
    """One device and what is measured on it.

    Args:
        args: Of the command line.
        device: ``"cuda"`` or ``"cpu"``.
        begin: When the script began, by ``time.monotonic``.
    """

    def __init__(self, args: argparse.Namespace, device: str, begin: float) -> None:
        self.args, self.begin = args, begin
        self.device, self.on_gpu = torch.device(device), device == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.content, self.rope = args.kv_lora_rank, args.qk_pos_emb_head_dim
        self._inputs: tuple[tuple, Inputs, Tensor] | None = None
        self._lost = ""
        self._flushed = torch.empty(
            _FLUSHED_BYTES if self.on_gpu else 1, dtype=torch.uint8, device=self.device
        )

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self.begin

    def describe(self) -> dict:
        """Device, versions, date, command line, ceilings, and what the cases have in common."""
        return {
            "date": provenance.today(),
            "command": shlex.join(command_line()),
            "commit": provenance.commit(),
            "device": torch.cuda.get_device_name() if self.on_gpu else provenance.processor(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "widths": [self.content, self.rope],
            "versions": provenance.versions(_PACKAGES),
            "ceilings": ceilings(self.on_gpu),
        }

    def measure(self, case: DecodeCase) -> Row:
        """Measure one case; what it raises is in its row."""
        try:
            if self._lost:
                raise Refused(f"left out: {self._lost} took the device away from this process")
            if self.elapsed > self.args.time_limit:
                raise Refused(f"left out: later than --time-limit {self.args.time_limit:g} s")
            row = self._measure(case)
        except Exception as error:
            row = failed(case, error)
            # A kernel that read where nothing is: no call of this process succeeds any more.
            if isinstance(error, torch.AcceleratorError):
                self._lost = self._lost or str(case)
        # After the block that held the tensors of a failed case in its traceback.
        gc.collect()
        return row

    def _measure(self, case: DecodeCase) -> Row:
        inputs, expected = self._inputs_of(case)
        attend = self._build(case, inputs)
        out = attend().float()
        difference = float((out - expected).norm() / expected.norm())
        graphed = self._graph(attend) if self.on_gpu and not self.args.no_graph else None
        repeated = Repeated(graphed or attend, None, self._flushed.zero_, self.on_gpu)
        repeated.once()
        times = repeated.times(repeated.once(), self.args.seconds_per_row)[0]
        return Row(case=case, times=times, graph=graphed is not None, difference=difference)

    def _build(self, case: DecodeCase, inputs: Inputs) -> Callable[[], Tensor]:
        """The attention, ready to be called again and again."""
        if case.implementation not in OURS:
            if not self.on_gpu:
                raise Refused("it needs a GPU")
            return FUNCTIONS[case.implementation](inputs)
        name = case.implementation.removeprefix("ours, ")
        request = PagedRequest(
            self.device, self.dtype, case.heads, self.content, self.rope, case.block_size
        )
        try:
            backend = choose(name, request)
        except ValueError as error:
            raise Refused(str(error)) from None
        forward = partial(backend.forward, *inputs)
        return lambda: forward()[0]

    def _graph(self, attend: Callable[[], Tensor]) -> Callable[[], None] | None:
        """The call as a CUDA graph; None where it cannot be recorded."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                attend()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph.replay

    def _inputs_of(self, case: DecodeCase) -> tuple[Inputs, Tensor]:
        """Inputs, and the output of the reference in fp32; kept for the next case."""
        if self._inputs is None or self._inputs[0] != case.input:
            self._inputs = None
            inputs = self._new_inputs(case)
            out, _ = paged_reference(inputs.q_content.float(), inputs.q_rope.float(), *inputs[2:])
            self._inputs = case.input, inputs, out
        return self._inputs[1:]

    def _new_inputs(self, case: DecodeCase) -> Inputs:
        make = torch.Generator(self.device).manual_seed(self.args.seed)
        random = partial(torch.randn, device=self.device, dtype=self.dtype, generator=make)
        blocks = -(-case.kv // case.block_size)
        cache = random(case.batch * blocks, case.block_size, self.content + self.rope)
        order = torch.randperm(len(cache), device=self.device, generator=make)
        lengths = [case.query_length] * case.batch
        rows = Rows.of(lengths, case.kv_lengths, order.int().view(case.batch, blocks))
        tokens = sum(lengths)
        # Scores of about 1 as after training: the softmax neither flat nor one key.
        scale = (self.content + self.rope) ** -0.5
        query = (random(tokens, case.heads, width) for width in (self.content, self.rope))
        return Inputs(*query, cache, rows, scale)
