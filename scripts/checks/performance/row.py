"""One comparison: the same work by ours and by a peer, measured in one file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.kit.report import Times
from benchmarks.kit.tables import tokens_text

MEGATRON = "Megatron + TE"


@dataclass(frozen=True)
class Row:
    """Ours and a peer's times of one work.

    Attributes:
        work: What both do, for people.
        peer: Name of the other implementation.
        ours: Seconds.
        theirs: Seconds of the peer.
        facts: Sizes and options by name, to choose rows by.
        file: Of the data, relative to docs/.
    """

    work: str
    peer: str
    ours: Times
    theirs: Times
    facts: dict[str, Any] = field(default_factory=dict)
    file: str = ""

    @property
    def name(self) -> tuple[str, str]:
        """Equal for repeated measurements of the same."""
        return self.work, self.peer

    @property
    def ratio(self) -> float:
        """Ours of the peer's; below 1 ours is faster."""
        return self.ours.median / self.theirs.median

    @property
    def slower(self) -> bool:
        """Whether ours is, as far as two digits tell."""
        return round(self.ratio, 2) > 1

    @property
    def spread(self) -> tuple[float, float] | None:
        """The ratios that single repetitions allow; None where one side has only one."""
        if min(self.ours.repetitions, self.theirs.repetitions) < 2:
            return None
        return self.ours.least / self.theirs.most, self.ours.most / self.theirs.least

    def fits(self, choices: Iterable[dict[str, tuple]]) -> bool:
        """Whether the facts are among the values of one choice."""
        return any(
            all(self.facts[name] in values for name, values in choice.items()) for choice in choices
        )


def recorded(path: Path) -> list[Any]:
    """The rows without errors in the file of a benchmark that is no more; times are ``Times``."""

    def read(content: dict) -> Any:
        return Times(**content) if "repetitions" in content else SimpleNamespace(**content)

    return without_errors(json.loads(path.read_text(), object_hook=read).rows)


def without_errors(rows: Iterable) -> list[Any]:
    """Those that have figures."""
    return [row for row in rows if not getattr(row, "error", "")]


def by_input(rows: Iterable, key: Callable[[Any], Hashable], name: Callable[[Any], str]) -> list:
    """For every input, in the order of ``rows``, the rows by the implementation's name."""
    found: dict[Hashable, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        found[key(row)][name(row)] = row
    return list(found.values())


def layer_work(heads: int, tokens: int, layout: str) -> str:
    """``"128 heads, 8k, one sequence"``."""
    kinds = {"sbhd": "one sequence", "thd": "pack"}
    return f"{heads} heads, {tokens_text(tokens)}, {kinds[layout]}"
