#!/usr/bin/env python3
r"""Measure decode: absorbed attention of new tokens over a paged latent cache, ours beside others'.

    $ python scripts/benchmarks/decode.py --json docs/decode.json --plot docs/decode.png
    $ python scripts/benchmarks/decode.py --heads 16 --batches 1,32,128 --kv 8k --block-sizes 64
    $ python scripts/benchmarks/decode.py --implementations "ours, hopper;FlashMLA" --kv 8k \
          --heads 16,64,128 --lengths uniform,exponential,one_long --block-sizes 64
    $ python scripts/benchmarks/decode.py --implementations "ours, triton" --kv 8k \
          --block-sizes 1,100
    $ python scripts/benchmarks/decode.py --implementations "ours, hopper;ours, hopper, fp8" --kv 8k
    $ python scripts/benchmarks/decode.py --kv 8k --block-sizes 64 \
          --implementations "ours, hopper, parity;ours, hopper, fp8, parity"
    $ python scripts/benchmarks/decode.py --device cpu --heads 2 --batches 2 --kv 100 \
          --block-sizes 16 --kv-lora-rank 32 --qk-pos-emb-head-dim 16
    $ python scripts/benchmarks/decode.py --render docs/decode/decode.json

The requests of a batch have so many keys as --lengths says:

    equal        --kv each
    spaced       evenly spaced up to --kv
    uniform      drawn from 64 to --kv
    exponential  drawn, --kv / 8 on average, from 64 to --kv
    one_long     one has --kv, the others --kv / 64

Their blocks lie in random order in the cache. Others are FlashMLA, FlashInfer and vLLM's kernels,
where they can be imported; what cannot run has the reason in its row. Outputs are compared with the
reference's in fp32; "..., fp8" attends over FP8 rows (latent_cache_dtype), and is compared with the
reference over what is read from them; "..., parity" is parity mode (batch_invariant), measured
where it is named. The widths are DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. On a
GPU a call is recorded as a CUDA graph where that is possible, and the L2 cache is overwritten
before every repetition, outside of the time. All implementations of an input are repeated in turns.
A call counts

    pairs = sum(kv * s_q - s_q * (s_q - 1) / 2)           causal inside the new tokens
    FLOP  = heads * pairs * 2 * (2 * kv_lora_rank + rope) scores and values
    bytes = sum(kv) * (kv_lora_rank + rope) * width       the latents, read once (FP8: its rows)

and its rates are to be compared with those of a matrix product and of a copy (read and written),
measured in the same run. The ratio is that of the time to FlashMLA's of the same turn: the median
of all turns, and what a tenth of them are below and above (low, high). Output:

    1.9 s  FlashMLA n=128 b=128 kv=8192 s_q=1 block=64: us 545, tflops 536, tbps 2.22
    1.9 s  ours, hopper n=128 b=128 kv=8192 s_q=1 block=64: us 484, .., ratio 0.89, low 0.88, ..

The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.decode_cases import FAST, IMPLEMENTATIONS, IN_PARITY, LENGTHS, Case
from benchmarks.decode_report import DecodeReport, Ratio, Row
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, list_of, one_of, parse_sizes
from benchmarks.kit.report import Refused, Times, reason
from benchmarks.kit.run import Benchmark
from benchmarks.peers.decode import PEERS, Attend, Inputs
from console.parser import Parser
from console.script import leave

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.kit.timing import Repeated

_WIDTHS = ("kv-lora-rank", "qk-pos-emb-head-dim")
_PACKAGES = ("flash-mla", "flashinfer-python", "vllm")
# More than any L2 cache.
_FLUSHED_BYTES = 256 * 2**20

# The peer of ratios.
_PEER = "FlashMLA"


def cases(args: argparse.Namespace, device: str) -> list[Case]:
    """Implementations beside each other, smaller inputs first, other block sizes last."""
    implementations = args.implementations or (FAST if device == "cuda" else IMPLEMENTATIONS)
    inputs = product(
        args.lengths,
        args.block_sizes,
        sorted(args.query_lengths),
        sorted(args.kv),
        sorted(args.batches),
        sorted(args.heads),
    )
    found = [
        Case(implementation, heads, batch, kv, new, block, lengths)
        for lengths, block, new, kv, batch, heads in inputs
        for implementation in implementations
    ]
    return arguments.chosen(found, args.only)


class DecodeBenchmark(Benchmark):
    """Implementations beside each other on the same inputs, compared with the reference."""

    script = "decode.py"
    report = DecodeReport

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        device = arguments.use_device(args.device)
        import torch

        self.device = torch.device(device)
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.content, self.rope = args.kv_lora_rank, args.qk_pos_emb_head_dim
        # The last input, and the rows of its cases or why there are none.
        self._last: tuple[tuple, dict[str, Row | str]] | None = None
        flushed = _FLUSHED_BYTES if self.on_gpu else 1
        self._flushed = torch.empty(flushed, dtype=torch.uint8, device=self.device)

    @classmethod
    def add_options(cls, parser: Parser) -> None:
        """See --help."""
        add = parser.add_argument
        arguments.add_common(parser, json=None, plot=None, render=None, only=None, device=None)
        arguments.add_common(
            parser, heads="128,16", seconds_per_row=0.1, time_limit=400.0, seed=1234
        )
        add("--batches", type=parse_sizes, default="1,8,32,64,128", help="numbers of requests")
        keys = "keys of each request, its new tokens included; k is 1024"
        add("--kv", type=parse_sizes, default="1k,4k,8k,32k", help=keys)
        lengths = f"how many keys the requests have: {', '.join(LENGTHS)} (see above)"
        add("--lengths", type=list_of(one_of(tuple(LENGTHS))), default="equal", help=lengths)
        add("--query-lengths", type=parse_sizes, default="1,2", help="new tokens of each request")
        add("--block-sizes", type=parse_sizes, default="64,16", help="tokens of a cache block")
        # Their names have commas.
        implementations = list_of(one_of((*IMPLEMENTATIONS, *IN_PARITY)), separator=";")
        names = f"separated by ; (default: on a GPU {'; '.join(FAST)}; on a CPU all but parity)"
        add("--implementations", type=implementations, help=f"what to measure, {names}")
        arguments.add_dims(parser, {name: DIMS[name] for name in _WIDTHS})

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """New tokens are among the keys."""
        if max(args.query_lengths) > min(args.kv):
            parser.error(
                f"--query-lengths must be at most the keys of --kv: {max(args.query_lengths)} new "
                f"tokens are more than {min(args.kv)}"
            )

    def environment(self) -> dict:
        """With the rates that the device reaches."""
        from benchmarks.kit.timing import ceilings

        return provenance.describe(
            self.on_gpu,
            self.dtype,
            widths=[self.content, self.rope],
            versions=provenance.versions(_PACKAGES),
            ceilings=ceilings(self.on_gpu),
        )

    def cases(self) -> list[Case]:
        """Implementations beside each other."""
        return cases(self.args, self.device.type)

    def measure(self, case: Case) -> Row:
        """Measure one case, with the first of an input all others of it.

        Raises:
            Refused: If the implementation does not support it, or is not installed, or failed.
        """
        if self._last is None or self._last[0] != case.input:
            self._last = None
            self._last = case.input, self._measure_all(case)
        found = self._last[1][case.implementation]
        if isinstance(found, str):
            raise Refused(found)
        return found

    def _measure_all(self, case: Case) -> dict[str, Row | str]:
        """Rows of all cases of an input, or why there is none, by implementation."""
        import torch

        from benchmarks.kit.timing import in_turns, repetitions

        inputs, expected = self._inputs_of(case)
        found: dict[str, Row | str] = {}
        works: dict[str, Repeated] = {}
        for other in (other for other in self.cases() if other.input == case.input):
            try:
                found[other.implementation], works[other.implementation] = self._prepare(
                    other, inputs, expected
                )
            except self.errors as error:
                if isinstance(error, torch.AcceleratorError):
                    raise
                found[other.implementation] = reason(error)
        if not works:
            return found
        running = [*works.values()]
        count = max(repetitions(work.once(), self.args.seconds_per_row) for work in running)
        turns = in_turns(running, count)
        seconds = {name: [step for _, _, step in own] for name, own in zip(works, turns)}
        for name, own in seconds.items():
            row = found[name]
            assert isinstance(row, Row)
            peer = seconds.get(_PEER) if name != _PEER else None
            ratio = Ratio.of(own, peer) if peer else None
            found[name] = replace(row, times=Times.of(own), ratio=ratio)
        return found

    def _prepare(self, case: Case, inputs: Inputs, expected: Tensor) -> tuple[Row, Repeated]:
        """A row without times, and the work that gives them, done once.

        Raises:
            Refused: If the implementation does not support the case, or is not installed.
        """
        from benchmarks.kit.timing import Repeated

        if case.over_fp8:
            inputs, expected = self._over_fp8(inputs)
        attend = self._build(case, inputs)
        out = attend().float()
        difference = float((out - expected).norm() / expected.norm())
        graphed = self._graph(attend) if self.on_gpu else None
        work = Repeated(graphed or attend, finish=self._flushed.zero_, on_gpu=self.on_gpu)
        work.once()
        return Row(case=case, graph=graphed is not None, difference=difference), work

    def _build(self, case: Case, inputs: Inputs) -> Attend:
        """The attention, ready to be called again and again."""
        from absorbed_mla.inference.backend import PagedRequest, choose

        if case.implementation in PEERS:
            if not self.on_gpu:
                raise Refused("it needs a GPU")
            return PEERS[case.implementation](inputs)
        name = case.backend
        request = PagedRequest(
            self.device,
            self.dtype,
            case.heads,
            self.content,
            self.rope,
            case.block_size,
            case.batch_invariant,
            latent_cache_dtype="fp8" if case.over_fp8 else "model",
        )
        try:
            backend = choose(name, request)
        except ValueError as error:
            raise Refused(str(error)) from None
        forward = partial(backend.forward, *inputs, batch_invariant=case.batch_invariant)
        return lambda: forward()[0]

    def _graph(self, attend: Attend) -> Callable[[], None] | None:
        """The call as a CUDA graph; None where it cannot be recorded."""
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                attend()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
        return graph.replay

    def _inputs_of(self, case: Case) -> tuple[Inputs, Tensor]:
        """Inputs, and the output of the reference in fp32."""
        from absorbed_mla.inference.backends.reference import paged_reference

        inputs = self._new_inputs(case)
        out, _ = paged_reference(inputs.q_content.float(), inputs.q_rope.float(), *inputs[2:])
        return inputs, out

    def _over_fp8(self, inputs: Inputs) -> tuple[Inputs, Tensor]:
        """The same with a cache of FP8 rows, and the reference's output over what it reads."""
        from absorbed_mla.fp8_latents import Fp8Latents
        from absorbed_mla.inference.backends.reference import paged_reference

        rows = Fp8Latents(self.content, self.rope).encode(inputs.cache)
        read = Fp8Latents(self.content, self.rope).decode(rows, self.dtype)
        out, _ = paged_reference(inputs.q_content.float(), inputs.q_rope.float(), read, *inputs[3:])
        return inputs._replace(cache=rows), out

    def _new_inputs(self, case: Case) -> Inputs:
        import torch

        from absorbed_mla.inference.rows import Rows

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


if __name__ == "__main__":
    leave(DecodeBenchmark.main())
