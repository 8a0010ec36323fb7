"""What ``/metrics`` shows, in Prometheus' text format, under vLLM's names where vLLM has them."""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.statistics import Statistics

# Bounds of the buckets of histograms: seconds of requests and of single tokens, and numbers. Those
# of vLLM are among them, which alerts may name.
_SMALL = (0.005, 0.01, 0.02, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.25, 0.3, 0.5, 0.75, 0.8)
_LARGE = (1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30, 40, 50, 60, 100, 120, 240, 480, 960, 1920)
_OF_REQUESTS = (*_SMALL, *_LARGE)
_OF_TOKENS = (
    *(0.002, 0.005, 0.01, 0.02, 0.025, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_NUMBERS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
# Why outputs end. All are shown from the beginning on: from 0 to 1 is an increase, too.
_REASONS = ("stop", "length", "abort", "error")
# vLLM's names without ``vllm:``, what is said of them, and bounds.
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From request to first token", _OF_REQUESTS),
    ("e2e_request_latency_seconds", "From request to its end", _OF_REQUESTS),
    ("request_queue_time_seconds", "From request to the first step for it", _OF_REQUESTS),
    ("request_prefill_time_seconds", "From that step to the first token", _OF_REQUESTS),
    ("request_decode_time_seconds", "From first to last token", _OF_REQUESTS),
    ("request_inference_time_seconds", "From the first step to the last token", _OF_REQUESTS),
    ("inter_token_latency_seconds", "Between two tokens of an output", _OF_TOKENS),
    ("request_time_per_output_token_seconds", "Mean of a request's tokens", _OF_TOKENS),
    ("request_prompt_tokens", "Tokens of a request's prompt", _NUMBERS),
    ("request_generation_tokens", "Tokens of a request's outputs", _NUMBERS),
)
_logger = logging.getLogger(__name__)
_REQUEST = (
    "request %(request_id)a %(endpoint)s %(status)d: %(prompt_tokens)d prompt tokens "
    "(%(cached_tokens)d cached), %(completion_tokens)d generated, %(finish_reason)s; "
    "seconds: queue %(queue_seconds)s, ttft %(ttft_seconds)s, total %(total_seconds)s"
)
# Characters of a client's id of a request.
_MOST_SHOWN = 200


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
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts):
            total += count
            buckets.append((str(bound), total))
        found = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        found.add_metric([model], buckets, self._sum)
        return found


@dataclass(slots=True)
class _Running:
    """A request that runs: when it began, and its outputs' tokens and times of first and last."""

    began: float
    counts: list[int]
    firsts: list[float]
    lasts: list[float]


class Metrics:
    """Counters of one server; written by the model's thread, read by any.

    Args:
        model: Name of the model, a label of each figure.

    Attributes:
        model: As given.
        engine: Its newest statistics.
        paths: That are counted by themselves, so that clients cannot make more of them.
    """

    def __init__(self, model: str = "model") -> None:
        self.model, self.engine = model, Statistics()
        self.paths: set[str] = set()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._finished = Counter(dict.fromkeys(_REASONS, 0))
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._prompt_tokens = self._generated = 0
        self._histograms = {
            name: _Histogram(f"vllm:{name}", text, bounds) for name, text, bounds in _HISTOGRAMS
        }
        self._running: dict[str, _Running] = {}

    def begin(self, request_id: str, since: float, outputs: int) -> None:
        """A request was queued.

        Args:
            since: When it came, as ``time.monotonic`` has it.
            outputs: How many it asks for.
        """
        self._running[request_id] = _Running(since, *([0] * outputs for _ in range(3)))

    def observe(self, outputs: Sequence[RequestOutput]) -> None:
        """A step has run, in which these have grown or ended."""
        now, gaps, seen = time.monotonic(), Counter[float](), self._histograms
        for output in outputs:
            running = self._running[output.request_id]
            counts, lasts = running.counts, running.lasts
            is_first = not any(counts)
            for i, one in enumerate(output.outputs):
                new = len(one.token_ids) - counts[i]
                if not new:
                    continue
                if counts[i]:
                    gaps[(now - lasts[i]) / new] += new
                else:
                    running.firsts[i] = now
                counts[i] += new
                lasts[i] = now
                self._generated += new
            if is_first and any(counts):
                seen["time_to_first_token_seconds"].observe(now - running.began)
                self._prompt_tokens += len(output.prompt_token_ids)
            if output.finished:
                self._end(output, now)
        for gap, count in gaps.items():
            seen["inter_token_latency_seconds"].observe(gap, count)

    def stop(self, reason: str) -> None:
        """The model has stopped, and what ran has ended with it."""
        for running in self._running.values():
            self._finished[reason] += len(running.counts)
        self._running.clear()

    def answered(self, path: str, method: str, status: int) -> None:
        """An answer has begun."""
        handler = path if path in self.paths else "other"
        self._answered[handler, method if method in ("GET", "POST") else "other", str(status)] += 1

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """See ``prometheus_client``."""
        engine = self.engine
        counters = (
            ("prompt_tokens", "Tokens of prompts", self._prompt_tokens),
            ("generation_tokens", "Tokens generated", self._generated),
            ("prefix_cache_queries", "Tokens of prompts looked for", engine.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache", engine.prefix_hits),
            ("num_preemptions", "Requests that lost their blocks", engine.evicted),
            ("spec_decode_num_drafts", "Times that a request's tokens were drafted", engine.drafts),
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
                found.add_metric([self.model], value)
                yield found
        yield from (one.family(self.model) for one in self._histograms.values())
        labels = ["model_name", "finished_reason"]
        ended = CounterMetricFamily("vllm:request_success", "Outputs that ended", labels=labels)
        for reason, count in list(self._finished.items()):
            ended.add_metric([self.model, reason], count)
        yield ended
        labels = ["handler", "method", "status"]
        answers = CounterMetricFamily("http_requests", "Answers, by their status", labels=labels)
        for values, count in list(self._answered.items()):
            answers.add_metric(values, count)
        yield answers

    def _end(self, output: RequestOutput, now: float) -> None:
        running, seen = self._running.pop(output.request_id), self._histograms
        counts, begun = running.counts, output.first_scheduled_time
        spans = {"e2e_request_latency": now - running.began}
        if begun is not None:
            # Of the other clock, which counts from the epoch.
            begun = max(running.began, begun - (time.time() - now))
            spans["request_queue_time"] = begun - running.began
        if any(counts):
            pairs = [(a, z) for a, z, n in zip(running.firsts, running.lasts, counts) if n]
            first, last = min(a for a, _ in pairs), max(z for _, z in pairs)
            spans["request_decode_time"] = last - first
            if begun is not None:
                spans["request_prefill_time"] = max(0.0, first - begun)
                spans["request_inference_time"] = max(0.0, last - begun)
            if gaps := sum(counts) - len(pairs):
                spans["request_time_per_output_token"] = sum(z - a for a, z in pairs) / gaps
        for name, seconds in spans.items():
            seen[f"{name}_seconds"].observe(seconds)
        seen["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        seen["request_generation_tokens"].observe(sum(counts))
        for one in output.outputs:
            self._finished[one.finish_reason or "abort"] += 1


class CountAnswers:
    """Counts the answers of an application, and logs the requests that a model has answered."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, state = 0, scope["state"]

        def count(found: int) -> None:
            nonlocal status
            status = state.get("refused", found)
            if "refused" not in state:
                self._metrics.answered(scope["path"], scope["method"], status)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except BaseException:
            if not status:
                count(500)
            raise
        finally:
            if "stream" in state:
                self._log(state, scope["path"], status)

    def _log(self, state: Mapping[str, Any], path: str, status: int) -> None:
        """Write a line about a request that a model has answered, or was to."""
        found = {
            "request_id": state["request_id"][:_MOST_SHOWN],
            "endpoint": path,
            "status": status,
            "model": self._metrics.model,
            **state["stream"].figures(),
        }
        shown = {name: "-" if value is None else value for name, value in found.items()}
        _logger.info(_REQUEST, shown, extra={"fields": found})
