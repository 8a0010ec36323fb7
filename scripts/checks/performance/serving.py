"""Our ``LLM`` and server beside vLLM's: results of serving.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.report import Times
from benchmarks.served.report import ServingReport
from checks.performance.row import Row, by_input

_PEERS = {"ours": "vllm", "ours-server": "vllm-server"}
_CALLED = {"vllm": "vLLM", "vllm-server": "vLLM's server"}


def serving_rows(path: Path) -> Iterator[Row]:
    """The time of 1,024 prompt tokens at the rate of prefill, and of a decode step.

    Of traffic, that of 1,024 output tokens at its rate, and until the first token of a request.
    """
    inputs = by_input(
        ServingReport.read(path).measured,
        lambda row: row.case.work,
        lambda row: row.case.implementation,
    )
    for found in inputs:
        for ours, theirs in _PEERS.items():
            if not {ours, theirs} <= found.keys():
                continue
            case = found[ours].case
            facts = {"requests": case.size.requests, "prompt": case.size.prompt}
            pair = (found[ours], found[theirs])
            if case.size.rounds > 1:
                times = {
                    "1k of outputs": [1024 / one.output_tokens_per_second for one in pair],
                    "first token": [one.ttft_ms / 1e3 for one in pair],
                }
            else:
                times = {
                    "1k of prompts": [1024 / one.prefill_tokens_per_second for one in pair],
                    "decode step": [one.step_ms / 1e3 for one in pair],
                }
            for what, seconds in times.items():
                work = f"{what}, {case.work}"
                yield Row(work, _CALLED[theirs], *(Times.of([s]) for s in seconds), facts)
