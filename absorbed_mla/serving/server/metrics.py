"""What ``/metrics`` shows, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from absorbed_mla.serving.outputs import RequestOutput

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Counters of one server; written by the model's thread, read by any."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        made = {"registry": self._registry, "namespace": "absorbed_mla"}
        self._requests = Counter("requests", "Requests that have ended", ["finish_reason"], **made)
        self._prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **made)
        self._generated = Counter("generated_tokens", "Tokens generated", **made)
        self._running = Gauge("outputs_running", "Outputs that run or wait", **made)
        self._first = Histogram(
            "first_token_seconds", "From request to first token", buckets=_SECONDS, **made
        )
        self._whole = Histogram(
            "request_seconds", "From request to its end", buckets=_SECONDS, **made
        )
        # When requests that run began, and how many of their tokens are counted.
        self._began: dict[str, float] = {}
        self._counted: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """A request was queued."""
        self._began[request_id] = time.monotonic()

    def observe(self, outputs: Sequence[RequestOutput], num_running: int) -> None:
        """A step has run.

        Args:
            outputs: That have grown or ended.
            num_running: Outputs that run or wait.
        """
        now, generated = time.monotonic(), 0
        for output in outputs:
            name = output.request_id
            count = sum([len(one.token_ids) for one in output.outputs])
            before = self._counted.get(name, 0)
            self._counted[name] = count
            generated += count - before
            if count and not before:
                self._first.observe(now - self._began.setdefault(name, now))
                self._prompt_tokens.inc(len(output.prompt_token_ids))
            if output.finished:
                self._end(output, now)
        self._generated.inc(generated)
        self._running.set(num_running)

    def _end(self, output: RequestOutput, now: float) -> None:
        name = output.request_id
        self._whole.observe(now - self._began.pop(name, now))
        for one in output.outputs:
            self._requests.labels(one.finish_reason).inc()
        del self._counted[name]

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)
