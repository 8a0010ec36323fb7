"""What ``/metrics`` shows, in Prometheus' text format, under vLLM's names where vLLM has them."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.statistics import Statistics

# Bounds of the buckets of histograms, in seconds: of requests, and of single tokens.
_OF_REQUESTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_OF_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
# Paths that are counted by themselves, so that clients cannot make more of them.
_PATHS = {
    *("/health", "/metrics", "/ping", "/version", "/tokenize", "/detokenize", "/v1/models"),
    *("/v1/completions", "/v1/chat/completions"),
}


class _Histogram:
    """Takes several equal values at once, unlike the library's."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value ``count`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, model: str) -> Metric:
        """As Prometheus has it: buckets with all that is below their bounds."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, "+Inf"), self._counts):
            total += count
            buckets.append((str(bound), total))
        found = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        found.add_metric([model], buckets, self._sum)
        return found


class Metrics:
    """Counters of one server; written by the model's thread, read by any.

    Args:
        model: Name of the model, a label of each figure.

    Attributes:
        engine: Its newest statistics.
    """

    def __init__(self, model: str = "model") -> None:
        self._model = model
        self.engine = Statistics()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._finished: Counter[str] = Counter()
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._prompt_tokens = self._generated = 0
        names = (
            ("time_to_first_token", "From request to first token", _OF_REQUESTS),
            ("e2e_request_latency", "From request to its end", _OF_REQUESTS),
            ("inter_token_latency", "Between two tokens of an output", _OF_TOKENS),
            ("request_time_per_output_token", "Mean of a request's tokens", _OF_TOKENS),
        )
        self._first, self._whole, self._between, self._mean = self._histograms = [
            _Histogram(f"vllm:{name}_seconds", text, bounds) for name, text, bounds in names
        ]
        # Of requests that run: when they began and when they got their first and last token, and
        # how many tokens are counted.
        self._began: dict[str, float] = {}
        self._times: dict[str, tuple[float, float]] = {}
        self._counted: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        """A request was queued."""
        self._began[request_id] = time.monotonic()

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """A step has run, in which these have grown or ended."""
        now, gaps = time.monotonic(), Counter[float]()
        for output in outputs:
            name = output.request_id
            count = sum([len(one.token_ids) for one in output.outputs])
            before = self._counted.get(name, 0)
            self._counted[name] = count
            if count > before:
                self._generated += count - before
                if before:
                    first, last = self._times[name]
                    gaps[(now - last) / (count - before) * len(output.outputs)] += count - before
                    self._times[name] = first, now
                else:
                    self._first.observe(now - self._began.setdefault(name, now))
                    self._times[name] = now, now
                    self._prompt_tokens += len(output.prompt_token_ids)
            if output.finished:
                self._end(output, now)
        for gap, count in gaps.items():
            self._between.observe(gap, count)

    def answered(self, path: str, method: str, status: int) -> None:
        """An answer has begun."""
        handler = path if path in _PATHS else "other"
        self._answered[handler, method if method in ("GET", "POST") else "other", str(status)] += 1

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client``."""
        engine, hits = self.engine, self.engine.prefix_tokens
        counters = (
            ("prompt_tokens", "Tokens of prompts", self._prompt_tokens),
            ("generation_tokens", "Tokens generated", self._generated),
            ("prefix_cache_queries", "Tokens looked for in the prefix cache", self._prompt_tokens),
            ("prefix_cache_hits", "Tokens found there", hits),
            ("num_preemptions", "Requests that lost their blocks", engine.evicted),
            ("spec_decode_num_draft_tokens", "Tokens drafted", engine.drafted),
            ("spec_decode_num_accepted_tokens", "Drafts generated", engine.accepted),
        )
        gauges = (
            ("num_requests_running", "Outputs that run", engine.running),
            ("num_requests_waiting", "Outputs that wait", engine.waiting),
            ("kv_cache_usage_perc", "Share of the cache that requests use", engine.cache_usage),
        )
        for kind, figures in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, text, value in figures:
                found = kind(f"vllm:{name}", text, labels=["model_name"])
                found.add_metric([self._model], value)
                yield found
        yield from (one.family(self._model) for one in self._histograms)
        labels = ["model_name", "finished_reason"]
        ended = CounterMetricFamily("vllm:request_success", "Outputs that ended", labels=labels)
        for reason, count in list(self._finished.items()):
            ended.add_metric([self._model, reason], count)
        yield ended
        labels = ["handler", "method", "status"]
        answers = CounterMetricFamily("http_requests", "Answers, by their status", labels=labels)
        for values, count in list(self._answered.items()):
            answers.add_metric(values, count)
        yield answers

    def _end(self, output: RequestOutput, now: float) -> None:
        name = output.request_id
        self._whole.observe(now - self._began.pop(name, now))
        first, last = self._times.pop(name, (now, now))
        each = self._counted.pop(name) / max(1, len(output.outputs))
        if each > 1:
            self._mean.observe((last - first) / (each - 1))
        for one in output.outputs:
            self._finished[one.finish_reason or "abort"] += 1


class CountAnswers:
    """Counts the answers of an application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"].rstrip("/")
                self._metrics.answered(path, scope["method"], message["status"])
            await send(message)

        await self._app(scope, receive, counted)
