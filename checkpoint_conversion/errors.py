"""The converter's error for users, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, does not fit, or must not be written.

    Attributes:
        problems: All problems, one line each.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join((summary, *(f"  {problem}" for problem in self.problems))))


def raise_problems(summary: str, problems: Sequence[str]) -> None:
    """Raise a :class:`CheckpointError` if there are any problems."""
    if problems:
        raise CheckpointError(summary, problems)


class KnownNames:
    """Finds the known name that is most like an unknown one, ignoring numbers in names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)
        self._by_pattern: dict[str, str] = {}
        for name in self._names:
            self._by_pattern.setdefault(_pattern(name), name)
        # A model has thousands of tensors, but a few dozen patterns.
        self._found: dict[str, str | None] = {}

    def nearest(self, name: str) -> str | None:
        """The known name most like ``name``, with the same numbers if possible; None if none is."""
        pattern = _pattern(name)
        if pattern not in self._found:
            close = difflib.get_close_matches(pattern, self._by_pattern, n=1, cutoff=0.6)
            self._found[pattern] = close[0] if close else None
        near = self._found[pattern]
        if near is None:
            return None
        numbers = re.findall(r"\d+", name)
        if len(numbers) == near.count("#"):
            numbered = re.sub("#", lambda _: numbers.pop(0), near)
            if numbered in self._names:
                return numbered
        return self._by_pattern[near]


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)
