#!/usr/bin/env python3
r"""Measure decode: absorbed attention of new tokens over a paged latent cache, ours beside others'.

    $ python scripts/benchmarks/decode.py --json docs/decode.json --plot docs/decode.png
    $ python scripts/benchmarks/decode.py --quick --heads 16
    $ python scripts/benchmarks/decode.py --implementations "ours, triton" --kv 8k \
          --block-sizes 1,100
    $ python scripts/benchmarks/decode.py --device cpu --heads 2 --batches 2 --kv 100 \
          --block-sizes 16 --kv-lora-rank 32 --qk-pos-emb-head-dim 16

Rows are requests of equal length, with --uneven of any length too, whose blocks lie scattered.
Others are FlashMLA, FlashInfer and vLLM's kernels, where they can be imported; what refuses or is
not there says why, and what is measured is compared with the reference in fp32. The widths are
DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. On a GPU a call is recorded as a CUDA
graph where that is possible, and the L2 cache is overwritten before every repetition, outside of
the time. A call counts

    pairs = sum(kv * s_q - s_q * (s_q - 1) / 2)           causal inside the new tokens
    FLOP  = heads * pairs * 2 * (2 * kv_lora_rank + rope) scores and values
    bytes = sum(kv) * (kv_lora_rank + rope) * width       the latents, read once

and its rates are to be compared with those of a matrix product and of a copy (read and written),
measured in the same run. Output:

    1.9 s  FlashMLA n=128 b=128 kv=8192 s_q=1 block=64: us 545, tflops 536, tbps 2.22

The table goes to stderr; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from absorbed_mla.options import PAGED_ATTENTION_BACKENDS
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, list_of, one_of, parse_sizes, seconds
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import Refused, Report, Results, Times, reason
from console.outputs import require_writable
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.inference.rows import Rows

_WIDTHS = ("kv-lora-rank", "qk-pos-emb-head-dim")
_DEFAULTS = {"batches": "1,8,32,64,128", "kv": "1k,4k,8k,32k", "block_sizes": "64,16"}
_QUICK = {"batches": "1,32,128", "kv": "8k", "block_sizes": "64"}
_PACKAGES = ("flash-mla", "flashinfer-python", "vllm")
_ITEMSIZE = {"bfloat16": 2, "float32": 4}
# More than any L2 cache.
_FLUSHED_BYTES = 256 * 2**20

# ---- peers
#
# A peer gets the query, the cache and the rows, and returns a function without arguments that gives
# the output [T, N, C]. What it does before that, a server does once per step.


class Inputs(NamedTuple):
    """Of one call; see ``paged_reference``."""

    q_content: Tensor
    q_rope: Tensor
    cache: Tensor
    rows: Rows
    scale: float


Attend = Callable[[], "Tensor"]


def flash_mla(inputs: Inputs) -> Attend:
    """FlashMLA's own package, or the copy in vLLM's."""
    import torch

    package = first_module("flash_mla", "vllm.v1.attention.ops.flashmla")
    q_content, q_rope, cache, rows, scale = inputs
    new, (_, heads, width) = rows.max_query_length, q_content.shape
    query = torch.cat((q_content, q_rope), dim=-1).view(len(rows), new, heads, -1)
    schedule, splits = package.get_mla_metadata(rows.kv_lengths, new * heads, 1)

    def attend() -> Tensor:
        out, _ = package.flash_mla_with_kvcache(
            query,
            cache.unsqueeze(2),
            rows.block_table,
            rows.kv_lengths,
            width,
            schedule,
            splits,
            softmax_scale=scale,
            causal=True,
        )
        return out.view(-1, heads, width)

    return attend


def flash_infer(inputs: Inputs) -> Attend:
    """FlashInfer's paged MLA; it compiles its kernels with the first call."""
    import torch

    package = first_module("flashinfer.mla")
    q_content, q_rope, cache, rows, scale = inputs
    (_, heads, width), rope, size = q_content.shape, q_rope.shape[-1], cache.shape[1]
    workspace = torch.empty(128 * 2**20, dtype=torch.int8, device=cache.device)
    wrapper = package.BatchMLAPagedAttentionWrapper(workspace)
    blocks = -(-rows.max_kv_length // size)
    count = torch.arange(len(rows) + 1, dtype=torch.int32, device=cache.device)
    wrapper.plan(
        count * rows.max_query_length,
        count * blocks,
        rows.block_table[:, :blocks].flatten().contiguous(),
        rows.kv_lengths,
        heads,
        width,
        rope,
        size,
        True,  # causal
        scale,
        q_content.dtype,
        cache.dtype,
    )
    return lambda: wrapper.run(q_content, q_rope, cache[..., :width], cache[..., width:])


def vllm_flash_attention_3(inputs: Inputs) -> Attend:
    """FlashAttention-3 with a value part of the query, as vLLM's MLA calls it."""
    import torch

    package = first_module("vllm.vllm_flash_attn")
    q_content, q_rope, cache, rows, scale = inputs
    width = q_content.shape[-1]
    ends = torch.arange(len(rows) + 1, dtype=torch.int32, device=cache.device)
    return lambda: package.flash_attn_varlen_func(
        q=q_rope,
        k=cache[..., None, width:],
        v=cache[..., None, :width],
        q_v=q_content,
        max_seqlen_q=rows.max_query_length,
        cu_seqlens_q=ends * rows.max_query_length,
        max_seqlen_k=rows.max_kv_length,
        seqused_k=rows.kv_lengths,
        block_table=rows.block_table,
        softmax_scale=scale,
        causal=True,
        fa_version=3,
    )


def vllm_triton(inputs: Inputs) -> Attend:
    """The Triton kernel of vLLM, with the four splits that it always has."""
    import torch

    package = first_module("vllm.v1.attention.ops.triton_decode_attention")
    q_content, q_rope, cache, rows, scale = inputs
    if rows.max_query_length > 1:
        raise Refused("it takes one new token of a request")
    tokens, heads, width = q_content.shape
    query, out = torch.cat((q_content, q_rope), dim=-1), torch.empty_like(q_content)
    lse, splits = out.new_empty(tokens, heads), 4
    logits = out.new_empty(tokens, heads, splits, width + 1, dtype=torch.float32)

    def attend() -> Tensor:
        package.decode_attention_fwd(
            query,
            cache.unsqueeze(2),
            cache[..., None, :width],
            out,
            lse,
            rows.block_table,
            rows.kv_lengths,
            logits,
            splits,
            scale,
            cache.shape[1],
        )
        return out

    return attend


def first_module(*modules: str):
    """The first that can be imported."""
    reasons = []
    for module in modules:
        try:
            return importlib.import_module(module)
        except Exception as error:  # compiled parts raise what they like
            reasons.append(f"{module} cannot be imported ({error})")
    raise Refused("; ".join(reasons))


PEERS: dict[str, Callable[[Inputs], Attend]] = {
    "FlashMLA": flash_mla,
    "FlashInfer": flash_infer,
    "vLLM, FlashAttention-3": vllm_flash_attention_3,
    "vLLM, Triton": vllm_triton,
}
OURS = tuple(f"ours, {name}" for name in PAGED_ATTENTION_BACKENDS if name != "auto")
IMPLEMENTATIONS = (*OURS, *PEERS)
# The reference takes too long at the sizes that are measured on a GPU.
FAST = tuple(name for name in IMPLEMENTATIONS if name != "ours, reference")

# ---- cases


@dataclass(frozen=True)
class Case:
    """Requests, and whose attention.

    Attributes:
        implementation: One of :data:`IMPLEMENTATIONS`.
        heads: Of one rank.
        batch: Requests.
        kv: Keys of each, or of the longest; the new tokens' included.
        query_length: New tokens of each.
        block_size: Tokens in a block of the cache.
        uneven: Whether requests have any number of keys up to ``kv``.
    """

    implementation: str
    heads: int
    batch: int
    kv: int
    query_length: int
    block_size: int
    uneven: bool = False

    def __str__(self) -> str:
        return (
            f"{self.implementation} n={self.heads} b={self.batch} kv={self.keys} "
            f"s_q={self.query_length} block={self.block_size}"
        )

    @property
    def input(self) -> tuple[int | str, ...]:
        """What cases that are compared have in common."""
        return self.heads, self.batch, self.keys, self.query_length, self.block_size

    @property
    def keys(self) -> str:
        """``kv`` as people read it."""
        return f"<={self.kv}" if self.uneven else str(self.kv)

    @property
    def kv_lengths(self) -> list[int]:
        """Keys of each request: if uneven, evenly spaced up to ``kv``, in any order."""
        if not self.uneven:
            return [self.kv] * self.batch
        step = (self.kv - self.query_length) / self.batch
        lengths = [self.kv - int(number * step) for number in range(self.batch)]
        random.Random(self.batch).shuffle(lengths)
        return lengths

    def flops(self, content: int, rope: int) -> float:
        """Of scores and values; a token sees its request's keys up to its own."""
        new = self.query_length
        pairs = sum(self.kv_lengths) * new - self.batch * (new * (new - 1) / 2)
        return self.heads * pairs * 2 * (2 * content + rope)

    def latent_bytes(self, content: int, rope: int, itemsize: int) -> int:
        """Of all keys, read once."""
        return sum(self.kv_lengths) * (content + rope) * itemsize


def cases(args: argparse.Namespace, device: str) -> list[Case]:
    """Implementations beside each other, smaller inputs first, other block sizes last."""
    implementations = args.implementations or (FAST if device == "cuda" else IMPLEMENTATIONS)
    inputs = product(
        (False, True) if args.uneven else (False,),
        args.block_sizes,
        sorted(args.query_lengths),
        sorted(args.kv),
        sorted(args.batches),
        sorted(args.heads),
    )
    found = [
        Case(implementation, heads, batch, kv, new, block, uneven)
        for uneven, block, new, kv, batch, heads in inputs
        for implementation in implementations
    ]
    return arguments.chosen(found, args.only)


# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("decode.py", __doc__)
    add = parser.add_argument
    arguments.add_render(parser, several=False)
    add("--json", type=Path, metavar="FILE", help="where the report goes, written after each case")
    add("--plot", type=Path, metavar="FILE", help="a PNG of rates over the batch")
    arguments.add_only(parser)
    arguments.add_device(parser)
    quick = "batches of 1, 32 and 128, 8k keys, blocks of 64, unless given"
    add("--quick", action="store_true", help=quick)
    add("--heads", type=parse_sizes, default="128,16", help="query heads")
    add("--batches", type=parse_sizes, help=f"requests (default: {_DEFAULTS['batches']})")
    add("--kv", type=parse_sizes, help=f"keys of each, k is 1024 (default: {_DEFAULTS['kv']})")
    add("--uneven", action="store_true", help="requests of any number of keys up to --kv, too")
    add("--query-lengths", type=parse_sizes, default="1,2", help="new tokens of a request")
    add(
        "--block-sizes",
        type=parse_sizes,
        help=f"of the cache (default: {_DEFAULTS['block_sizes']})",
    )
    add(
        "--implementations",
        # Their names have commas.
        type=list_of(one_of(IMPLEMENTATIONS), separator=";"),
        help=f"whose, separated by ; (default: on a GPU {'; '.join(FAST)}; else all)",
    )
    add("--no-graph", action="store_true", help="launch calls from the host")
    add("--seconds-per-row", type=seconds, default=0.1, help="of repetitions")
    add("--time-limit", type=seconds, default=400.0, help="leave out rows after so many seconds")
    arguments.add_seed(parser, "the inputs")
    arguments.add_dims(parser, {name: DIMS[name] for name in _WIDTHS})
    args = parser.parse_args(argv)
    for name, text in (_QUICK if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, parse_sizes(text))
    arguments.check_files(None, args.render)
    if max(args.query_lengths) > min(args.kv):
        parser.error(
            f"--query-lengths must be at most the keys of --kv: {max(args.query_lengths)} new "
            f"tokens are more than {min(args.kv)}"
        )
    require_writable(files={"--json": args.json, "--plot": args.plot})
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code, 2 after wrong input."""
    return run_script("decode.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> None:
    if args.render:
        [report] = DecodeReport.show_again(args.render, sys.stderr)
    else:
        report = measure_all(args)
    shown = results(report)
    if args.plot:
        shown.draw(args.plot, sys.stderr)
    shown.print(sys.stderr)


def measure_all(args: argparse.Namespace) -> DecodeReport:
    """Measure every case, writing the results after each.

    Raises:
        ValueError: If the device is not there.
    """
    begin = time.monotonic()
    device = arguments.use_device(args.device)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from benchmarks.kit.timing import ceilings

    bench = Bench(args, device, begin)
    environment = provenance.describe(
        bench.on_gpu,
        bench.dtype,
        widths=[bench.content, bench.rope],
        versions=provenance.versions(_PACKAGES),
        ceilings=ceilings(bench.on_gpu),
    )
    report = DecodeReport(environment)
    for case in cases(args, device):
        report.rows.append(bench.measure(case))
        if args.json:
            report.write(args.json)
        print(f"{bench.elapsed:5.1f} s  {report.line(report.rows[-1])}", file=sys.stderr)
    return report


# ---- measuring


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, or why there are no figures of it.

    Attributes:
        case: What was measured.
        times: Of one call; None if it was not measured.
        graph: Whether the call was a CUDA graph.
        difference: Relative difference of the output from the reference's in fp32.
        error: Empty, or why figures are missing.
    """

    case: Case
    times: Times | None = None
    graph: bool = False
    difference: float | None = None
    error: str = ""


class Bench:
    """One device and what is measured on it.

    Args:
        args: Of the command line.
        device: ``"cuda"`` or ``"cpu"``.
        begin: When the script began, by ``time.monotonic``.
    """

    def __init__(self, args: argparse.Namespace, device: str, begin: float) -> None:
        import torch

        self.args, self.begin = args, begin
        self.device, self.on_gpu = torch.device(device), device == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.content, self.rope = args.kv_lora_rank, args.qk_pos_emb_head_dim
        # The last input, and the reference's output of it.
        self._inputs: tuple[tuple, Inputs, Tensor] | None = None
        # The case whose kernel took the device away.
        self._lost = ""
        flushed = _FLUSHED_BYTES if self.on_gpu else 1
        self._flushed = torch.empty(flushed, dtype=torch.uint8, device=self.device)

    @property
    def elapsed(self) -> float:
        """Seconds since the script began."""
        return time.monotonic() - self.begin

    def measure(self, case: Case) -> Row:
        """Measure one case; what it raises is in its row."""
        import torch

        try:
            if self._lost:
                raise Refused(f"left out: {self._lost} took the device away from this process")
            if self.elapsed > self.args.time_limit:
                raise Refused(f"left out: later than --time-limit {self.args.time_limit:g} s")
            row = self._measure(case)
        except Exception as error:
            row = Row(case=case, error=reason(error))
            # After an illegal access no call of this process succeeds any more.
            if isinstance(error, torch.AcceleratorError):
                self._lost = self._lost or str(case)
        # After the block that held the tensors of a failed case in its traceback.
        gc.collect()
        return row

    def _measure(self, case: Case) -> Row:
        from benchmarks.kit.timing import Repeated

        inputs, expected = self._inputs_of(case)
        attend = self._build(case, inputs)
        out = attend().float()
        difference = float((out - expected).norm() / expected.norm())
        graphed = self._graph(attend) if self.on_gpu and not self.args.no_graph else None
        repeated = Repeated(graphed or attend, finish=self._flushed.zero_, on_gpu=self.on_gpu)
        repeated.once()
        times = repeated.times(repeated.once(), self.args.seconds_per_row)[0]
        return Row(case=case, times=times, graph=graphed is not None, difference=difference)

    def _build(self, case: Case, inputs: Inputs) -> Attend:
        """The attention, ready to be called again and again."""
        from absorbed_mla.inference.backend import PagedRequest, choose

        if case.implementation not in OURS:
            if not self.on_gpu:
                raise Refused("it needs a GPU")
            return PEERS[case.implementation](inputs)
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

        if self._inputs is None or self._inputs[0] != case.input:
            self._inputs = None
            inputs = self._new_inputs(case)
            out, _ = paged_reference(inputs.q_content.float(), inputs.q_rope.float(), *inputs[2:])
            self._inputs = case.input, inputs, out
        return self._inputs[1:]

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


# ---- report


class DecodeReport(Report):
    """One run."""

    row = Row

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds, TFLOP/s, TB/s of latents read, and the difference from the reference."""
        assert row.times is not None
        content, rope = self.environment["widths"]
        itemsize = _ITEMSIZE[self.environment["dtype"]]
        duration = row.times.median
        return {
            "us": round(duration * 1e6, 2),
            "tflops": row.case.flops(content, rope) / duration / 1e12,
            "tbps": row.case.latent_bytes(content, rope, itemsize) / duration / 1e12,
            "graph": row.graph,
            "difference": row.difference,
        }


def results(report: DecodeReport) -> Results:
    """Everything that is shown."""
    reached = report.environment["ceilings"]
    rates = f"product {reached['matmul_tflops']:.3g} TFLOP/s, copy {reached['copy_tbps']:.3g} TB/s"
    notes = [f"{report.environment['device']}: {rates}"]
    return Results([report], panels(report), notes)


def panels(report: DecodeReport) -> list[Panel]:
    """TFLOP/s, and TB/s of latents, with the ceilings, over the batch."""
    found = []
    for rate, unit, ceiling in (
        ("tflops", "TFLOP/s", "matmul_tflops"),
        ("tbps", "TB/s", "copy_tbps"),
    ):
        points = (
            (
                f"n={case.heads} kv={case.keys} s_q={case.query_length} block={case.block_size} "
                f"[{unit}]",
                case.implementation,
                case.batch,
                report.figures(row)[rate],
            )
            for row in report.measured
            for case in (row.case,)
        )
        levels = {ceiling: report.environment["ceilings"][ceiling]}
        found.append(collected(points, "batch", levels=levels))
    # Both rates of the same requests beside each other.
    return [panel for pair in zip(*found) for panel in pair]


if __name__ == "__main__":
    leave(main())
