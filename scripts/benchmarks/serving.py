#!/usr/bin/env python3
r"""``LLM`` and the server beside vLLM's: time to first token, prefill and decode tokens per second.

    $ python scripts/benchmarks/serving.py --vllm /tmp/vllm --json serving.json
    $ python scripts/benchmarks/serving.py --implementations ours,ours-parity --json parity.json
    $ python scripts/benchmarks/serving.py --implementations ours,ours-structured --rows 32x1k/256 \
          --temperature 1 --json structured.json

All run the same checkpoint of random weights with DeepSeek-V3's widths: 4 dense and 4 MoE layers,
written to --model (16 experts, for which vLLM has tuned its kernels on an H200). A row is of one of
two kinds:

    32x1k/256      32 requests arrive at once, each with a prompt of 1k tokens and 256 to generate
    64x1k/256*4    traffic: 4 x 64 requests, 64 of them at a time, the next one when one ends;
                   tokens of prompts and outputs are drawn evenly from half to one and a half times
                   1k and 256, the same for all implementations

Prompts are random token ids, so that no prefix is shared, and outputs have their exact length. Each
implementation runs in processes of its own, with the same number of tokens in a step, the same
cache and CUDA graphs; `ours`, `vllm` and, only if they are named, `ours-parity` (LLM(parity=True)),
`ours-parity-parts` (with tensor_parallel_parts=8), `ours-structured` (outputs are JSON of a schema)
and `ours-lora` (requests take turns with 4 adapters of rank 16) are driven step by step and take
turns at each row, then the servers, over HTTP with one stream per request; nothing is measured
before all of them are ready. Before a row is measured, its number of requests runs with few output
tokens, and with prompts that are read while others generate. Output:

    61.0 s  ours, 32 x 1k/256: ttft_ms 410, ..., prefill_tokens_per_second 60000, step_ms 10.6

ttft_ms is the time from sending a request to its first token, the median of all; prefill tokens per
second those of requests with one output token (of --prefill-tokens in all at most), decode tokens
per second those of the time in which all requests of the row were generating, of which step_ms is
the time per token of each. Of traffic, output tokens are of its whole time, and token_ms is a
request's time per token after its first. Medians of --repeats, of five times as many where a row is
one request, which a busy host delays by milliseconds. The exit code is 1 if a row has an error.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.arguments import parse_size, use_device
from benchmarks.served.burst import Burst
from benchmarks.served.contenders import (
    IMPLEMENTATIONS,
    USUAL,
    Contender,
    ContenderError,
    missing_for_our_server,
    start,
    vllm_version,
)
from benchmarks.served.engines import BLOCK, Settings
from benchmarks.served.model import (
    MODEL_OPTIONS,
    TINY_MODEL,
    choice_of,
    token_bytes,
    write_model,
)
from benchmarks.served.report import Case, Row, ServingReport, Size, parse_row
from console.outputs import require_writable
from console.parser import Parser

ROWS = "1x1k/256,32x1k/256,128x1k/256,1x8k/256,32x8k/256,128x8k/256"
_TTFT = ("ttft_ms", "ttft_mean_ms", "ttft_p90_ms")
# Implementations that live at the same time.
TOGETHER = (
    ("ours", "ours-parity", "ours-parity-parts", "ours-structured", "ours-lora", "vllm"),
    ("ours-server", "vllm-server"),
)
# Seconds that processes have to start, vLLM's compiler included.
_START_LIMIT = 240.0
# Repetitions of a row of one request for each of others.
_TIMES_ALONE = 5
# Steps that all requests of a warm-up decode together.
WARM_UP_STEPS = 8
# Of the checkpoint's config.json.
_MODEL_FIELDS = (
    *("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "intermediate_size"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "vocab_size"),
)
_SETTINGS = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "cache_tokens", "graphs")


def _temperature(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip()):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return float(text)


class ServingBenchmark(kit.Benchmark):
    """Every size at every implementation."""

    report = ServingReport
    strict = True
    options = kit.declare(
        f"json render device time_limit=540 seed=1234 repeats=2 {MODEL_OPTIONS}",
        implementations=kit.some(
            f"some of {', '.join(IMPLEMENTATIONS)}", IMPLEMENTATIONS, ",".join(USUAL)
        ),
        rows=kit.Option(
            "requests x prompt / output, with * rounds for traffic", kit.list_of(parse_row), ROWS
        ),
        temperature=kit.Option(
            "of the sampling, 0 is greedy; rows are measured with each",
            kit.list_of(_temperature),
            "0",
        ),
        prefill_tokens=kit.Option(
            "most prompt tokens of a burst that measures prefill alone", parse_size, "64k"
        ),
        max_num_batched_tokens=kit.number("most tokens of a step, beside one of a request", 8192),
        vllm=kit.Option("folder with vLLM (default: the one that is installed)", Path),
        server_packages=kit.Option(
            "folder with what our server needs, searched after the packages that are installed; "
            "may be that of --vllm (default: those alone)",
            Path,
            more={"metavar": "FOLDER"},
        ),
        model=kit.Option(
            "folder of the checkpoint; written if it is missing (default: a temporary one)", Path
        ),
        logs=kit.Option("folder for the processes' output (default: a temporary one)", Path),
    )
    quick = (
        f"--implementations ours --rows 2x64/8 {TINY_MODEL} --max-num-batched-tokens 128 "
        "--repeats 1"
    )
    recorded = ("dense_layers", "moe_layers", "prefill_tokens", "repeats")

    def prepare(self) -> None:
        """The checkpoint, and what all are started with."""
        args = self.args
        self._stack = contextlib.ExitStack()
        work = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._logs = args.logs or work
        self._logs.mkdir(parents=True, exist_ok=True)
        model = args.model or work / "model"
        self._device = use_device(args.device)
        # Before anything is computed on the GPU: it forks.
        self._config = write_model(model, choice_of(args))
        self._settings = settings(args, self._config, model, self._device)
        self._running: dict[str, Contender] = {}
        self._failed: dict[str, ContenderError] = {}
        self._ended: set[str] = set()
        self._warm: set[tuple] = set()

    @classmethod
    def check(cls, parser: Parser, args: argparse.Namespace) -> None:
        """That vLLM and what our server needs are there."""
        require_writable(folders={"--logs": args.logs})
        if args.server_packages and not args.server_packages.is_dir():
            parser.error(f"--server-packages must be a folder, got {args.server_packages}")
        theirs = [name for name in args.implementations if name.startswith("vllm")]
        if theirs and not args.render and not vllm_version(args.vllm):
            where = f"in {args.vllm}" if args.vllm else "installed here"
            parser.error(
                f"--implementations {','.join(theirs)} needs the package vllm, which is not "
                f"{where}: pip install vllm==0.24.0, or --vllm FOLDER"
            )
        if "ours-server" in args.implementations and not args.render:
            missing = missing_for_our_server(args.server_packages)
            if missing:
                where = f" or in {args.server_packages}" if args.server_packages else ""
                parser.error(
                    f"--implementations ours-server needs {', '.join(missing)}, not installed "
                    f"here{where}: pip install 'absorbed-mla[serve]', or --server-packages FOLDER"
                )

    def environment(self) -> dict:
        """With the sizes of the model and what all implementations are started with."""
        return kit.provenance.describe(
            self._device == "cuda",
            "bfloat16",
            **self.about(),
            **{name: self._config[name] for name in _MODEL_FIELDS},
            **{name: getattr(self._settings, name) for name in _SETTINGS},
            interleaved="; ".join(", ".join(names) for names in TOGETHER),
            versions={"vllm": vllm_version(self.args.vllm) or "not installed"},
        )

    def cases(self) -> list[Case]:
        """Those that live at the same time row by row, then the others."""
        return [
            Case(name, size, temperature)
            for together in TOGETHER
            for size in self.args.rows
            for temperature in self.args.temperature
            for name in together
            if name in self.args.implementations
        ]

    def rows(self) -> Iterator[Row]:
        """The rows of all cases; processes end with their last one."""
        cases = self.cases()
        try:
            for number, case in enumerate(cases):
                yield self.row(case)
                ended = set(self._running) - {one.implementation for one in cases[number + 1 :]}
                for name in ended:
                    self._running.pop(name).close()
                self._ended |= ended
        finally:
            for one in self._running.values():
                one.close()
            self._stack.close()

    def _run(self) -> int:
        # They load their weights while this process looks at the machine.
        self._start(self.cases()[0].implementation)
        return super()._run()

    def measure(self, case: Case) -> Row:
        """Warm up, then repeat a burst with one output token each and one with all of them.

        Traffic is repeated alone.
        """
        contender, size = self._contender(case), case.size
        self._warm_up(contender, case)
        row = Row(case=case, start_seconds=contender.start_seconds)
        times = self.args.repeats * (_TIMES_ALONE if size.requests * size.rounds == 1 else 1)
        prefills, bursts = [], []
        for repeat in range(times):
            if size.rounds == 1:
                prefills.append(self._burst(contender, case, self._prefill(size), repeat))
            bursts.append(self._burst(contender, case, size, repeat))
        if size.rounds > 1:
            names = (*_TTFT, "output_tokens_per_second", "token_ms", "token_p90_ms")
            rates = [one["output_tokens_per_second"] for one in bursts]
            return dataclasses.replace(row, output_rates=rates, **_medians(bursts, names))
        rates = [rate for one in bursts if (rate := one["decode_tokens_per_second"]) is not None]
        return dataclasses.replace(
            row,
            **_medians(bursts, _TTFT),
            prefill_tokens_per_second=median(one["input_tokens_per_second"] for one in prefills),
            decode_tokens_per_second=median(rates) if rates else None,
            step_ms=1e3 * size.requests / median(rates) if rates else None,
            decode_rates=rates,
        )

    def _start(self, name: str) -> list[str]:
        """Start an implementation and those that live at the same time, until their last cases."""
        names = next(names for names in TOGETHER if name in names)
        together = [n for n in names if n in self.args.implementations and n not in self._ended]
        for one in together:
            if one not in self._running.keys() | self._failed:
                theirs = one.startswith("vllm")
                folder = self.args.vllm if theirs else self.args.server_packages
                self._running[one] = start(one, self._settings, self._logs / f"{one}.log", folder)
        return together

    def _contender(self, case: Case) -> Contender:
        """The process of an implementation, when those that live with it are ready, too.

        One that loads and compiles takes the GPU's time from the others.

        Raises:
            ContenderError: If it did not start, now or for a former case.
        """
        name = case.implementation
        for one in self._start(name):
            try:
                if one not in self._failed:
                    self._running[one].await_ready(_START_LIMIT)
            except ContenderError as error:
                self._failed[one] = error
                self._running.pop(one).close()
        if name in self._failed:
            raise self._failed[name]
        return self._running[name]

    def _warm_up(self, contender: Contender, case: Case) -> None:
        """Run what compiles at this number of requests, and at this length of a prompt."""
        sizes = [self._mixed(case.size)]
        if sizes[0].prompt < case.size.prompt:
            sizes.append(dataclasses.replace(self._prefill(case.size), output=WARM_UP_STEPS))
        for size in sizes:
            key = case.implementation, size, case.temperature
            if key not in self._warm:
                self._warm.add(key)
                self._burst(contender, case, size, "warm-up")

    def _mixed(self, size: Size) -> Size:
        """A row with outputs that last until all prompts are read, and shorter prompts if need be.

        So steps have every number of requests that generate while prompts are read.
        """
        rounds = min(size.rounds, 2)
        most = 2 * self.args.prefill_tokens // (size.requests * rounds)
        prompt = max(1, min(size.prompt, most))
        read = size.requests * rounds * prompt
        steps = -(-read // self.args.max_num_batched_tokens) + WARM_UP_STEPS
        return Size(size.requests, prompt, min(size.output, steps), rounds)

    def _prefill(self, size: Size) -> Size:
        """As many of a row's requests as ``--prefill-tokens`` allows, with one output token."""
        most = max(1, self.args.prefill_tokens // size.prompt)
        return Size(min(size.requests, most), size.prompt, 1)

    def _burst(
        self, contender: Contender, case: Case, size: Size, repeat: int | str
    ) -> dict[str, Any]:
        """Figures of a burst, which all implementations get alike, and each only once."""
        seed = zlib.crc32(f"{self.args.seed}: {case.work}, {size}, {repeat}".encode())
        sizes = size.requests, size.prompt, size.output
        vocabulary = self._config["vocab_size"]
        burst = Burst(*sizes, case.temperature, seed, vocabulary, size.rounds)
        left = self.args.begin + self.args.time_limit - time.monotonic()
        return contender.run(burst, max(left, 1.0))


def _medians(bursts: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, float]:
    """By name, of the figures that all bursts have."""
    found = {name: [one[name] for one in bursts] for name in names}
    return {name: median(each) for name, each in found.items() if None not in each}


def settings(args: argparse.Namespace, config: dict, model: Path, device: str) -> Settings:
    """What all implementations are started with: room for every row, and no more."""
    blocks = {size: -(-size.longest // BLOCK) for size in args.rows}
    longest = max(blocks.values())
    # One more block for each request: vLLM keeps some for itself, and plans one token ahead.
    cached = max(size.requests * (blocks[size] + 1) for size in args.rows)
    return Settings(
        model=str(model.resolve()),
        device=device,
        max_model_len=longest * BLOCK,
        max_num_seqs=max(size.requests for size in args.rows),
        max_num_batched_tokens=args.max_num_batched_tokens,
        cache_tokens=(max(cached, longest + 1) + BLOCK) * BLOCK,
        token_bytes=token_bytes(config),
        sizes=tuple(sorted({size.requests for size in args.rows})),
        graphs=device == "cuda",
    )


if __name__ == "__main__":
    kit.main(ServingBenchmark)
