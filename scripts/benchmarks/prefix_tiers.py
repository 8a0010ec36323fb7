#!/usr/bin/env python3
"""Time to the first token after a long prefix: computed, in the cache, in host memory, on disk.

    $ python scripts/benchmarks/prefix_tiers.py --json docs/measurements/inference/tiers.json

One request at a time, whose prompt is a prefix and --suffix other tokens, to a model with random
weights. The prefix is computed by an engine with prefix_cache_dir, found in its cache, and written
to the folder when it stops; new engines then find it there: once with the files in the machine's
page cache and once without them (posix_fadvise), and once into a cache of which --device-share is
on the device and the rest in host memory, from where it is then streamed. Output:

     9.3 s  32768 tokens, disk: first_ms 120, decode_ms 9.1, of_computed 0.2, disk_blocks 512

first_ms is from the request to its first token, decode_ms the time of a token after that,
of_computed the share of the computed prefix's time. In rows of host memory copy_ms is the time of
a step's copies while nothing else runs, and decode_ms of the row "device" that of a step without
them: the longer of both is the least that decode_ms can be. start_ms is the engine's start, which
reads all weights for the fingerprint, stop_ms writes what is new. The exit code is 1 if a row has
an error, such as blocks that were not found.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.generating import GeneratingBenchmark
from console.parser import Parser

if TYPE_CHECKING:
    from absorbed_mla.inference.kv_offload.blocks import OffloadedBlocks
    from absorbed_mla.serving.engine import Engine

torch: Any = kit.lazy("torch")
# In this order, of which each needs what the ones before left behind.
PLACES = ("computed", "device", "disk", "disk, cold", "disk to host", "host")
BLOCK = 64
COPY_ROUNDS = 5


@dataclass(frozen=True)
class TierCase(kit.Case):
    """Where a request finds its prefix."""

    text = "{context} tokens, {place}"
    context: int  # tokens of the prefix
    place: str  # one of PLACES


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """What one request took."""

    case: TierCase
    first_ms: float | None = None  # from the request to its first token
    decode_ms: float | None = None  # of a token after that, the mean
    of_computed: float | None = None  # first_ms, as a share of that of the computed prefix
    start_ms: float | None = None  # start of the engine, where this request was its first
    stop_ms: float | None = None  # end of the engine, where this request was its last
    disk_blocks: int | None = None  # blocks read from the folder
    streamed_blocks: int | None = None  # blocks that the last step streamed from host memory
    # Time in which as many blocks of all layers are copied from there, and nothing else.
    copy_ms: float | None = None
    disk_gbps: float | None = None  # GB/s of the files, over the whole time to the first token


class TiersBenchmark(GeneratingBenchmark):
    """All places of all contexts, over one model, on one device."""

    report = kit.Report.of(Row)
    options = kit.declare(
        "json render device time_limit=480 seed=1234",
        contexts=kit.sizes("tokens of the prefix", "32k,128k"),
        suffix=kit.number("tokens of the prompt after the prefix", 128),
        tokens=kit.number("to generate for each request", 9),
        step_tokens=kit.number("most tokens of a forward pass", 8192),
        device_share=kit.number(
            "of the cache, in percent, that is on the device in the rows of host memory", 25
        ),
        prefix_folder=kit.Option("new or empty, for the files (default: a temporary one)", Path),
        **kit.MODEL,
    )
    quick = "--contexts 512 --suffix 40 --tokens 3 --step-tokens 64 --num-layers 2 --vocab-size 64"
    recorded = ("dims", "suffix", "tokens", "step_tokens", "device_share")

    def prepare(self) -> None:
        """The model."""
        super().prepare()
        args = self.args
        self._model = self.model(max(args.contexts) + args.suffix + args.tokens)
        self._rows: Iterator[Row] = self._all()

    def about(self) -> dict:
        """With the size of the model."""
        return super().about() | {"weight_bytes": sum(p.nbytes for p in self._model.parameters())}

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """A cache has two parts, and a request several tokens."""
        if args.device_share >= 100:
            parser.error(f"--device-share must be below 100, got {args.device_share}")
        if args.tokens < 2:
            parser.error(f"--tokens must be at least 2, got {args.tokens}")
        folder = args.prefix_folder
        if folder is not None and folder.exists() and any(folder.iterdir()):
            parser.error(f"--prefix-folder must be new or empty, got {folder}")

    def cases(self) -> list[TierCase]:
        """One context after the other."""
        return [TierCase(context, place) for context in self.args.contexts for place in PLACES]

    def measure(self, case: TierCase) -> Row:
        """The next row: they follow from each other."""
        row = next(self._rows)
        assert row.case == case
        return row

    def _all(self) -> Iterator[Row]:
        # Kernels are compiled here, for prompts of every kind.
        with self._folder() as name:
            folder = Path(name)
            self._context(min(4096, min(self.args.contexts)), folder / "warm-up")
            for context in self.args.contexts:
                rows = self._context(context, folder / str(context))
                for row in rows:
                    share = row.first_ms / rows[0].first_ms
                    yield dataclasses.replace(row, of_computed=share)

    def _folder(self) -> AbstractContextManager[str]:
        if self.args.prefix_folder is None:
            return tempfile.TemporaryDirectory()
        return nullcontext(str(self.args.prefix_folder))

    def _context(self, context: int, folder: Path) -> list[Row]:
        """The rows of one length; the files are deleted."""
        found: list[Row] = []
        for places in (PLACES[:2], PLACES[2:3], PLACES[3:4], PLACES[4:]):
            if "disk, cold" in places:
                _forget_files(folder)
            engine = self._engine(context, folder, in_host="host" in places)
            start = self.clock()
            engine.start()
            start_ms = (self.clock() - start) * 1e3
            rows = [self._request(engine, TierCase(context, place)) for place in places]
            start = self.clock()
            engine.close()
            stop_ms = (self.clock() - start) * 1e3
            rows[0] = dataclasses.replace(rows[0], start_ms=start_ms)
            rows[-1] = dataclasses.replace(rows[-1], stop_ms=stop_ms)
            found += rows
        shutil.rmtree(folder)
        return found

    def _engine(self, context: int, folder: Path, *, in_host: bool) -> Engine:
        from absorbed_mla.serving.engine import Engine
        from absorbed_mla.serving.engine_options import EngineOptions

        length = context + self.args.suffix + self.args.tokens
        # Of two requests that share the prefix.
        tokens = (-(-length // BLOCK) + 8) * BLOCK
        step = min(self.args.step_tokens, -(-length // BLOCK) * BLOCK)
        least = -(-step // BLOCK) * BLOCK + 2 * BLOCK
        on_device = max(tokens * self.args.device_share // 100, least) if in_host else tokens
        options = EngineOptions(
            max_sequence_length=length,
            max_requests=1,
            cache_tokens=on_device,
            host_cache_tokens=max(tokens - on_device, BLOCK) if in_host else 0,
            step_tokens=step,
            prefix_cache_dir=folder,
            vocab_size=self.args.vocab_size,
        )
        return Engine(self._model, options)

    def _request(self, engine: Engine, case: TierCase) -> Row:
        """One request, whose suffix is of the place."""
        from absorbed_mla.serving.sampling.parameters import SamplingParams

        def random(tokens: int, seed: int) -> list[int]:
            generator = torch.Generator().manual_seed(seed)
            return torch.randint(self.args.vocab_size, (tokens,), generator=generator).tolist()

        prefix = random(case.context, self.args.seed)
        prompt = prefix + random(self.args.suffix, PLACES.index(case.place))
        before = dataclasses.replace(engine.statistics)
        sampling = SamplingParams(max_tokens=self.args.tokens, temperature=0)
        start, times = self.clock(), []
        number = engine.add_request(prompt, sampling)
        while engine.is_busy():
            for progress in engine.step():
                times += [self.clock()] * len(progress.tokens)
        error, done = engine.results[number].error, engine.statistics
        found = done.disk_blocks - before.disk_blocks
        blocks = case.context // BLOCK
        shared = blocks if case.place in ("device", "host") else 0
        if not error and done.prefix_blocks - before.prefix_blocks < max(found, shared):
            error = f"{done.prefix_blocks - before.prefix_blocks} blocks were found, not {blocks}"
        if not error and "disk" in case.place and found < blocks:
            error = f"{found} blocks came from disk, not {blocks}"
        tiers = getattr(engine.host.context, "tiers", None)
        size = self._block_bytes(engine)
        return Row(
            case=case,
            error=error,
            first_ms=(times[0] - start) * 1e3,
            decode_ms=(times[-1] - times[0]) * 1e3 / (len(times) - 1),
            disk_blocks=found,
            streamed_blocks=None if tiers is None else tiers.num_streamed,
            copy_ms=None if tiers is None else self._copy_ms(tiers),
            disk_gbps=found * size / (times[0] - start) / 1e9 if found else None,
        )

    def _copy_ms(self, tiers: OffloadedBlocks) -> float:
        """The best of some rounds over all layers, each a single copy."""
        sources = tiers.host[:, : tiers.num_streamed]
        target = sources[0].new_empty(sources.shape[1:], device=tiers.resident.device)
        rounds = []
        for _ in range(COPY_ROUNDS):
            start = self.clock()
            for source in sources:
                target.copy_(source, non_blocking=True)
            rounds.append(self.clock() - start)
        return min(rounds) * 1e3

    def _block_bytes(self, engine: Engine) -> int:
        memory = engine.host.context.memory_buffer
        return memory[:, 0].numel() * memory.itemsize


def _forget_files(folder: Path) -> None:
    """Write a folder's files to the disk, and drop them from the machine's page cache."""
    for path in folder.glob("*/*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    kit.main(TiersBenchmark)
