"""Scraped metrics, and the part of PromQL that the board's panels use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

# Values by the labels of their series, as Prometheus' instant vectors have them.
Vector = dict[frozenset[tuple[str, str]], float]

_NAMES = re.compile(r"\b(?:vllm:|http_|process_)\w+")
_SELECTOR = re.compile(r"[\w:]+")
_RATE = re.compile(r"rate\(([\w:]+)\[\$__rate_interval\]\)")
_AGGREGATE = re.compile(r"(sum|max)(?: by \((\w+)\) )?\((.*)\)")
_QUANTILE = re.compile(r"histogram_quantile\(([\d.]+), (.*)\)")


def metric_names(expression: str) -> list[str]:
    """The metrics that an expression reads."""
    return _NAMES.findall(expression)


class Recording:
    """Metrics of a server at several times.

    Args:
        window: Seconds of ``$__rate_interval``.

    Attributes:
        times: Of the scrapes, in seconds.
    """

    def __init__(self, window: float = 5.0) -> None:
        self._window = window
        self.times: list[float] = []
        self._scrapes: list[dict[str, Vector]] = []

    def add(self, time: float, text: str) -> None:
        """A scrape: what ``/metrics`` has shown."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, Vector] = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                found.setdefault(one.name, {})[frozenset(one.labels.items())] = one.value
        self.times.append(time)
        self._scrapes.append(found)

    def evaluate(self, expression: str, at: int) -> Vector:
        """Values of an expression at a scrape.

        Args:
            expression: A metric, or ``sum``, ``sum by``, ``max``, ``rate``, ``histogram_quantile``
                or the quotient of expressions.
            at: Number of the scrape.

        Raises:
            ValueError: If it is none of these.
        """
        left, divided, right = expression.partition(" / ")
        if divided:
            above, below = self.evaluate(left, at), self.evaluate(right, at)
            return {key: above[key] / below[key] for key in above if below.get(key)}
        if _SELECTOR.fullmatch(expression):
            return self._scrapes[at].get(expression, {})
        if found := _RATE.fullmatch(expression):
            return self._rate(found[1], at)
        if found := _AGGREGATE.fullmatch(expression):
            return _aggregate(found[1], found[2], self.evaluate(found[3], at))
        if found := _QUANTILE.fullmatch(expression):
            return _quantile(float(found[1]), self.evaluate(found[2], at))
        raise ValueError(f"an expression must be one that promql.py knows, got {expression!r}")

    def _rate(self, name: str, at: int) -> Vector:
        first = at
        while first and self.times[at] - self.times[first - 1] <= self._window:
            first -= 1
        scrapes = [one.get(name, {}) for one in self._scrapes[first : at + 1]]
        rates: Vector = {}
        for key in scrapes[-1]:
            # A series counts from where it is first seen.
            seen = [i for i, one in enumerate(scrapes) if key in one]
            values = [scrapes[i][key] for i in seen]
            seconds = self.times[first + seen[-1]] - self.times[first + seen[0]]
            if seconds:
                rates[key] = _increase(values) / seconds
        return rates


def _increase(values: list[float]) -> float:
    """Of a counter, which begins at 0 again where it falls."""
    return sum(b - a if b >= a else b for a, b in zip(values, values[1:]))


def _aggregate(kind: str, label: str | None, vector: Vector) -> Vector:
    groups: dict[frozenset[tuple[str, str]], list[float]] = {}
    for key, value in vector.items():
        kept = frozenset(pair for pair in key if pair[0] == label)
        groups.setdefault(kept, []).append(value)
    join = {"sum": sum, "max": max}[kind]
    return {key: join(values) for key, values in groups.items()}


def _quantile(share: float, buckets: Vector) -> Vector:
    """Within its bucket a value's place is as if all of them were spread evenly."""
    bounds = sorted((float(dict(key)["le"]), value) for key, value in buckets.items())
    total = bounds[-1][1] if bounds else 0.0
    if not total:
        return {}
    value = _within(share * total, bounds)
    return {frozenset(): value}


def _within(rank: float, bounds: Iterable[tuple[float, float]]) -> float:
    low, below = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank:
            full = math.isinf(bound) or count == below
            return low if full else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
