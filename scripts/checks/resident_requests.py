#!/usr/bin/env python3
r"""Count the requests that run at once in the same memory, with latents in bf16 and in FP8.

    $ python scripts/checks/resident_requests.py \
          --json docs/measurements/inference/resident-requests.json

Our engine gets more requests than fit, of --tokens tokens each, and a buffer of --buffer-gb for its
cache. It runs until a step has no more requests than the one before: the others wait for room. The
model has one layer and DeepSeek-V3's widths of the cache, 512 + 64; its other widths are tiny, and
change nothing. It is a count, no time, so a CPU measures it. It uses the models of the tests, so it
runs in a checkout only. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.arguments import add_common, count, parse, use_device
from benchmarks.kit.report import write_json
from console.parser import Parser
from console.script import leave, run_script

if TYPE_CHECKING:
    from absorbed_mla.serving.engine import Engine

CACHES = ("model", "fp8")
# Requests of the engine, more than fit. A step adds a prompt and a token to each of the others, so
# that the last prompt comes before the first request ends; all blocks are taken by the prompt.
_REQUESTS, _NEW_TOKENS = 48, 48
_BLOCK = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Count; returns the exit code."""
    return run_script("resident_requests.py", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> None:
    parser = Parser("resident_requests.py", __doc__)
    add_common(parser, json=None, device="cpu")
    parser.add_argument("--tokens", type=count, default=8192, help="of a request, x 64")
    parser.add_argument("--buffer-gb", type=float, default=0.1, help="GiB of the cache")
    args = parse(parser, argv)
    if args.tokens % _BLOCK:
        parser.error(f"--tokens must be a multiple of {_BLOCK}, got {args.tokens}")
    if not 0 < args.buffer_gb < 16:
        parser.error(f"--buffer-gb must be above 0 and below 16, got {args.buffer_gb}")
    use_device(args.device)
    warnings.filterwarnings("ignore")
    rows = measure(args.tokens, args.buffer_gb)
    about = {
        **provenance.source(),
        "device": args.device,
        "tokens": args.tokens,
        "buffer_gb": args.buffer_gb,
    }
    if args.json:
        write_json(args.json, {"environment": about, "rows": rows})
    print(json.dumps(rows))


def measure(tokens: int, buffer_gb: float) -> list[dict]:
    """One row for each of :data:`CACHES`: blocks of the cache, and requests at once."""
    from absorbed_mla.cpu_host import enable_cpu_host
    from tests.support import world

    enable_cpu_host()
    world.start()
    rows: list[dict] = []
    for cache in CACHES:
        engine = _engine(cache, tokens, buffer_gb)
        memory = engine.host.context.memory_buffer
        row = {
            "cache": cache,
            "bytes_per_token": memory[0, 0, 0].nbytes,
            "buffer_mib": memory.nbytes / 2**20,
            "at_once": _at_once(engine, tokens),
        }
        row["of_bf16"] = row["at_once"] / (rows[0] if rows else row)["at_once"]
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def _engine(cache: str, tokens: int, buffer_gb: float) -> Engine:
    import torch

    from absorbed_mla import AbsorbedMLAOptions
    from absorbed_mla.serving.engine import Engine
    from absorbed_mla.serving.engine_options import EngineOptions
    from tests.support.cases import TINY
    from tests.support.engine import generating_model

    mla = replace(TINY, hidden=32, heads=1, kv_lora_rank=512, rope=64, nope=8, v=8)
    # The form with the least work for one narrow head.
    options = AbsorbedMLAOptions(latent_cache_dtype=cache, form="expanded")
    model = generating_model(options, mla=mla, dtype=torch.bfloat16, num_layers=1)
    sizes = EngineOptions(
        max_sequence_length=tokens,
        max_requests=_REQUESTS,
        step_tokens=tokens,
        prefix_caching=False,
        chunked_prefill=False,
        inference_config={"buffer_size_gb": buffer_gb},
    )
    return Engine(model, sizes)


def _at_once(engine: Engine, tokens: int) -> int:
    """Requests that a step runs, when no further one fits."""
    from tests.support.engine import Request, prompt

    with engine:
        for number in range(_REQUESTS):
            request = Request(prompt(tokens - _NEW_TOKENS, number), _NEW_TOKENS)
            engine.add_request(request.prompt, request.sampling())
        at_once = -1
        while engine.statistics.most_rows > at_once:
            at_once = engine.statistics.most_rows
            engine.step()
        assert not engine.results and at_once < _REQUESTS, "the others wait for room"
        assert not engine.statistics.evicted and not engine.statistics.most_paused
        return at_once


if __name__ == "__main__":
    leave(main())
