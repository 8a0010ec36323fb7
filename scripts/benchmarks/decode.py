#!/usr/bin/env python3
r"""Measure decode: absorbed attention of new tokens over a paged latent cache, ours beside others'.

    $ python scripts/benchmarks/decode.py --json docs/decode.json --plot docs/decode.png
    $ python scripts/benchmarks/decode.py --heads 16 --batches 1,32,128 --kv 8k --block-sizes 64
    $ python scripts/benchmarks/decode.py --implementations "ours, hopper;FlashMLA" --kv 8k \
          --heads 16,64,128 --lengths uniform,exponential,one_long --block-sizes 64
    $ python scripts/benchmarks/decode.py --implementations "ours, hopper;ours, hopper, fp8" --kv 8k
    $ python scripts/benchmarks/decode.py --kv 8704 --shared-prefix 8k --batches 64 --heads 16 \
          --implementations "ours, hopper;ours, hopper, cascade" --query-lengths 1
    $ python scripts/benchmarks/decode.py --render docs/measurements/decode/decode.json

The requests of a batch have so many keys as --lengths says:

    equal        --kv each
    uniform      drawn from 64 to --kv
    exponential  drawn, --kv / 8 on average, from 64 to --kv
    one_long     one has --kv, the others --kv / 64

Their blocks lie in random order in the cache. Outputs are compared with the reference's in fp32;
"..., fp8" attends over FP8 rows (latent_cache_dtype), and is compared with the reference over what
is read from them; "..., parity" is parity mode (batch_invariant), measured where it is named;
"..., cascade" attends to the keys of --shared-prefix once for all requests. The widths are
DeepSeek-V3's; a GPU computes in bfloat16, a CPU in float32. On a GPU a call is recorded as a
CUDA graph where that is possible, and the L2 cache is overwritten before every repetition, outside
of the time. All implementations of an input are repeated in turns. A call counts

    pairs = sum(kv * s_q - s_q * (s_q - 1) / 2)           causal inside the new tokens
    FLOP  = heads * pairs * 2 * (2 * kv_lora_rank + rope) scores and values
    bytes = keys * (kv_lora_rank + rope) * width          the latents, read once (FP8: its rows)

and its rates are to be compared with those of a matrix product and of a copy (read and written),
measured in the same run. The ratio is that of the time to FlashMLA's of the same turn: the median
of all turns, and what a tenth of them are below and above (low, high). Output:

    1.9 s  FlashMLA n=128 b=128 kv=8192 s_q=1 block=64: us 545, tflops 536, tbps 2.22
    1.9 s  ours, hopper n=128 b=128 kv=8192 s_q=1 block=64: us 484, .., ratio 0.89, low 0.88, ..
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absorbed_mla.options import PAGED_ATTENTION_BACKENDS
from benchmarks import kit
from benchmarks.kit.arguments import parse_size
from benchmarks.peers.decode import PEERS, Attend, Inputs
from console.parser import Parser

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.inference.backend import PagedBackend
    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
OURS = tuple(f"ours, {name}" for name in PAGED_ATTENTION_BACKENDS if name != "auto")
_FP8, _PARITY, _CASCADE = ", fp8", ", parity", ", cascade"
OVER_FP8 = tuple(f"ours, {name}{_FP8}" for name in ("hopper", "reference", "triton"))
IMPLEMENTATIONS = (*OURS, *OVER_FP8, *PEERS)
# Measured where they are named.
IN_PARITY = tuple(
    f"ours, {name}{cache}{_PARITY}" for name in ("hopper", "triton") for cache in ("", _FP8)
)
# Measured with --shared-prefix.
CASCADES = tuple(f"ours, {name}{_CASCADE}" for name in ("hopper", "reference", "triton"))
# The reference takes too long at the sizes that are measured on a GPU.
FAST = tuple(name for name in (*IMPLEMENTATIONS, *CASCADES) if "reference" not in name)
# The peer of ratios.
_PEER = "FlashMLA"
_TITLE = "n={0.heads} b={0.batch} kv={0.keys} s_q={0.query_length} block={0.block_size}"
_PANEL = _TITLE.replace(" b={0.batch}", "")
_ITEMSIZE = {"bfloat16": 2, "float32": 4}
# The shortest of drawn requests.
_LEAST_KEYS = 64


# How many keys requests have; see the description.
LENGTHS = ("equal", "uniform", "exponential", "one_long")


def key_counts(lengths: str, batch: int, kv: int) -> list[int]:
    """Keys of every request of a batch; the same for the same arguments."""
    draw = random.Random(batch)
    if lengths == "uniform":
        return [draw.randint(min(_LEAST_KEYS, kv), kv) for _ in range(batch)]
    if lengths == "exponential":
        drawn = (int(draw.expovariate(8 / kv)) for _ in range(batch))
        return [min(max(keys, _LEAST_KEYS), kv) for keys in drawn]
    counts = [kv] * batch if lengths == "equal" else [kv] + [kv // 64] * (batch - 1)
    draw.shuffle(counts)
    return counts


@dataclass(frozen=True)
class DecodeCase(kit.Case):
    """Requests, and whose attention."""

    text = "{0.implementation} " + _TITLE
    implementation: str  # one of IMPLEMENTATIONS or IN_PARITY
    heads: int  # of one rank
    batch: int  # requests
    kv: int  # keys of each request, or at most, new tokens included
    query_length: int  # new tokens of each
    block_size: int  # tokens in a block of the cache
    lengths: str = "equal"  # how many keys the requests have, one of LENGTHS
    shared: int = 0  # first keys of all requests, which are the same

    @property
    def over_fp8(self) -> bool:
        """Whether the cache has FP8 rows."""
        return self.implementation.removesuffix(_PARITY).endswith(_FP8)

    @property
    def batch_invariant(self) -> bool:
        """Whether it runs in parity mode."""
        return self.implementation.endswith(_PARITY)

    @property
    def backend(self) -> str:
        """The name of ours among the backends."""
        return self.implementation.split(", ")[1]

    @property
    def keys(self) -> str:
        """``kv`` for people; ``"uniform<=8192"`` where not all requests have so many."""
        keys = str(self.kv) if self.lengths == "equal" else f"{self.lengths}<={self.kv}"
        return f"{keys} ({self.shared} shared)" if self.shared else keys

    @property
    def kv_lengths(self) -> list[int]:
        """Keys of each request, new tokens included."""
        counts = key_counts(self.lengths, self.batch, self.kv)
        return [max(keys, self.query_length) for keys in counts]

    def flops(self, content: int, rope: int) -> float:
        """Of scores and values; a token sees its request's keys up to its own."""
        new = self.query_length
        pairs = sum(self.kv_lengths) * new - self.batch * (new * (new - 1) / 2)
        return self.heads * pairs * 2 * (2 * content + rope)

    def latent_bytes(self, content: int, rope: int, itemsize: int) -> int:
        """Of all keys, read once."""
        row = (content + rope) * itemsize
        if self.over_fp8:
            from absorbed_mla.fp8_latents import Fp8Latents

            row = Fp8Latents(content, rope).row_bytes
        return (sum(self.kv_lengths) - (self.batch - 1) * self.shared) * row


@dataclass(frozen=True)
class Ratio:
    """Times divided by the peer's of the same turns: the median, and the outer tenths' bounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], peer: Sequence[float]) -> Ratio:
        """Of at least two turns, or of one without a spread."""
        ratios = [ours / theirs for ours, theirs in zip(own, peer, strict=True)]
        tenths = quantiles(ratios, n=10, method="inclusive") if len(ratios) > 1 else ratios
        return cls(median(ratios), tenths[0], tenths[-1])


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """Of one call."""

    times: kit.Times | None = None  # None if it was not measured
    graph: bool = False  # whether it was a CUDA graph
    # Relative difference of the output from the reference's in fp32.
    difference: float | None = None
    ratio: Ratio | None = None  # to FlashMLA; None for itself, or if it was not measured


class DecodeReport(kit.Report):
    """One run."""

    row, case = Row, DecodeCase
    plotted = ((f"{_PANEL} [TFLOP/s]", "tflops", "batch"), (f"{_PANEL} [TB/s]", "tbps", "batch"))

    def figures(self, row: Row) -> dict[str, float]:
        """Microseconds, TFLOP/s, TB/s of latents read, difference, and the ratio to FlashMLA."""
        assert row.times is not None
        content, rope = self.environment["widths"]
        itemsize = _ITEMSIZE[self.environment["dtype"]]
        duration, ratio = row.times.median, row.ratio
        beside = {"ratio": ratio.median, "low": ratio.low, "high": ratio.high} if ratio else {}
        return {
            "us": round(duration * 1e6, 2),
            "tflops": row.case.flops(content, rope) / duration / 1e12,
            "tbps": row.case.latent_bytes(content, rope, itemsize) / duration / 1e12,
            "graph": row.graph,
            "difference": row.difference,
            **beside,
        }


class DecodeBenchmark(kit.InTurns):
    """Implementations beside each other on the same inputs, compared with the reference."""

    report = DecodeReport
    options = kit.declare(
        "json plot render only device heads=128,16 seconds_per_row=0.1 time_limit=400 seed=1234",
        batches=kit.sizes("numbers of requests", "1,8,32,64,128"),
        kv=kit.sizes("keys of each request, its new tokens included; k is 1024", "1k,4k,8k,32k"),
        shared_prefix=kit.Option("first keys that all requests have together", parse_size),
        lengths=kit.some(
            f"how many keys the requests have: {', '.join(LENGTHS)} (see above)", LENGTHS, "equal"
        ),
        query_lengths=kit.sizes("new tokens of each request", "1,2"),
        block_sizes=kit.sizes("tokens of a cache block", "64,16"),
        # Their names have commas.
        implementations=kit.some(
            "what to measure, separated by ; "
            f"(default: on a GPU {'; '.join(FAST)}; on a CPU all but parity)",
            (*IMPLEMENTATIONS, *IN_PARITY, *CASCADES),
            None,
            separator=";",
        ),
        dims={name: kit.DIMS[name] for name in ("kv-lora-rank", "qk-pos-emb-head-dim")},
    )
    quick = "--batches 2 --kv 40 --query-lengths 2 --block-sizes 16 --shared-prefix 32"
    recorded = ("ceilings",)

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """New tokens are among the keys."""
        if max(args.query_lengths) > min(args.kv):
            parser.error(
                f"--query-lengths must be at most the keys of --kv: {max(args.query_lengths)} new "
                f"tokens are more than {min(args.kv)}"
            )
        shared, least = args.shared_prefix or 0, min(args.kv) - max(args.query_lengths)
        blocks = all(shared % size == 0 for size in args.block_sizes)
        if shared and not (shared <= least and blocks and args.lengths == ["equal"]):
            parser.error(
                f"--shared-prefix must be whole blocks, at most {least} keys, of requests of equal "
                f"--lengths, got {shared}"
            )

    def prepare(self) -> None:
        """Of one device, whose cache is overwritten."""
        from benchmarks.kit.timing import flush_l2

        self.use_one_device()
        self.content, self.rope = self.args.kv_lora_rank, self.args.qk_pos_emb_head_dim
        self._flush = flush_l2(self.device)

    def about(self) -> dict:
        """With the widths, and the packages of the peers."""
        versions = kit.provenance.versions(("flash-mla", "vllm"))
        return super().about() | {"widths": [self.content, self.rope], "versions": versions}

    def cases(self) -> list[DecodeCase]:
        """Implementations beside each other, smaller inputs first, other block sizes last."""
        args, shared = self.args, self.args.shared_prefix or 0
        inputs = product(
            args.lengths,
            args.block_sizes,
            sorted(args.query_lengths),
            sorted(args.kv),
            sorted(args.batches),
            sorted(args.heads),
        )
        measured = args.implementations or (FAST if self.on_gpu else (*IMPLEMENTATIONS, *CASCADES))
        return [
            DecodeCase(implementation, heads, batch, kv, new, block, lengths, shared)
            for lengths, block, new, kv, batch, heads in inputs
            for implementation in measured
            if shared or implementation not in CASCADES
        ]

    def begin(self, case: DecodeCase) -> None:
        """Inputs, and the output of the reference in fp32."""
        inputs = self._new_inputs(case)
        self.now.inputs = inputs, self._expected(inputs, inputs.cache)

    def work(self, case: DecodeCase) -> tuple[Repeated, dict]:
        """The call, as a graph where it can be recorded; its output has been compared."""
        from benchmarks.kit.timing import Repeated, graphed

        inputs, expected = self._over_fp8() if case.over_fp8 else self.now.inputs
        attend = self._attention(case, inputs)
        out = attend().float()
        difference = float((out - expected).norm() / expected.norm())
        graph = None
        if self.on_gpu:
            try:
                graph = graphed(attend)
            except RuntimeError:  # it cannot be recorded
                torch.cuda.synchronize()
        work = Repeated(graph or attend, finish=self._flush, on_gpu=self.on_gpu)
        work.once()
        return work, {"graph": graph is not None, "difference": difference}

    def count(self, works: Sequence[Repeated]) -> int:
        """So often that the shortest is repeated for --seconds-per-row."""
        from benchmarks.kit.timing import repetitions

        return max(repetitions(work.once(), self.args.seconds_per_row) for work in works)

    def repeated(self, seconds: Mapping[Any, Sequence[float]]) -> dict[Any, dict[str, Any]]:
        """Ratios to the peer's times of the same turns."""
        peer = next((own for case, own in seconds.items() if case.implementation == _PEER), None)
        others = {case: own for case, own in seconds.items() if peer and own is not peer}
        return {case: {"ratio": Ratio.of(own, peer)} for case, own in others.items()}

    def _attention(self, case: DecodeCase, inputs: Inputs) -> Attend:
        """Ready to be called again and again.

        Raises:
            Refused: If the implementation does not support it, or is not installed.
        """
        from absorbed_mla.inference.backend import PagedRequest, choose

        if case.implementation in PEERS:
            if not self.on_gpu:
                raise kit.Refused("it needs a GPU")
            return PEERS[case.implementation](inputs)
        cache = "fp8" if case.over_fp8 else "model"
        sizes = case.heads, self.content, self.rope, case.block_size
        request = PagedRequest(
            self.device, self.dtype, *sizes, case.batch_invariant, latent_cache_dtype=cache
        )
        with kit.refusing(ValueError):
            backend = choose(case.backend, request)
        if case.implementation.endswith(_CASCADE):
            return self._cascade(case, inputs, backend)
        forward = partial(backend.forward, *inputs, batch_invariant=case.batch_invariant)
        return lambda: forward()[0]

    def _cascade(self, case: DecodeCase, inputs: Inputs, backend: PagedBackend) -> Attend:
        """All requests as one group over what they share."""
        from absorbed_mla.inference.cascade import CascadeTables
        from absorbed_mla.serving.scheduler.cascade_attention import PrefixGroup, tables_of

        size, tokens = case.block_size, case.batch * case.query_length
        group = PrefixGroup(torch.arange(case.batch).numpy(), case.shared // size)
        numbers = tables_of([group], case.batch, case.query_length, tokens, size).to(self.device)
        rows = CascadeTables(*numbers).rows(inputs.rows, size)
        call = partial(backend.forward, *inputs._replace(rows=rows))
        return lambda: call()[0]

    def _expected(self, inputs: Inputs, cache: Tensor) -> Tensor:
        from absorbed_mla.inference.backends.reference import paged_reference

        query = inputs.q_content.float(), inputs.q_rope.float()
        return paged_reference(*query, cache, *inputs[3:])[0]

    def _over_fp8(self) -> tuple[Inputs, Tensor]:
        """The same with a cache of FP8 rows, and the reference's output over what it reads."""
        from absorbed_mla.fp8_latents import Fp8Latents

        inputs, rows = self.now.inputs[0], Fp8Latents(self.content, self.rope)
        encoded = rows.encode(inputs.cache)
        expected = self._expected(inputs, rows.decode(encoded, self.dtype))
        return inputs._replace(cache=encoded), expected

    def _new_inputs(self, case: DecodeCase) -> Inputs:
        from absorbed_mla.inference.rows import Rows

        make, normal = self.randoms()
        blocks = -(-case.kv // case.block_size)
        cache = normal(case.batch * blocks, case.block_size, self.content + self.rope)
        order = torch.randperm(len(cache), device=self.device, generator=make)
        lengths = [case.query_length] * case.batch
        table = order.int().view(case.batch, blocks)
        table[:, : case.shared // case.block_size] = table[0, : case.shared // case.block_size]
        rows = Rows.of(lengths, case.kv_lengths, table)
        # Scores of about 1 as after training: the softmax neither flat nor one key.
        scale = (self.content + self.rope) ** -0.5
        query = (normal(sum(lengths), case.heads, w) for w in (self.content, self.rope))
        return Inputs(*query, cache, rows, scale)


if __name__ == "__main__":
    kit.main(DecodeBenchmark)
