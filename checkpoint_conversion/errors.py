"""The errors that a user of the conversion can meet."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, does not fit, or must not be written.

    Attributes:
        problems: Everything that is wrong, one line each.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join((summary, *(f"  {problem}" for problem in self.problems))))


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` was most likely meant to be; numbers in names do not count.

    Args:
        name: A tensor's name that nothing knows.
        candidates: Names that would be known.
    """
    by_pattern = {re.sub(r"\d+", "N", candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(re.sub(r"\d+", "N", name), by_pattern, n=1, cutoff=0.6)
    return by_pattern[found[0]] if found else None
