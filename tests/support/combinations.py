"""Parametrization by a grid: all combinations of its dimensions, or a covering array of them.

On a CPU tests run a covering array: any two (or three) dimensions take all combinations of their
values; one dimension less with 4 processes, and another with 8, as fewer have run the same code in
those combinations. GPUs run all combinations.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from tests.support import world

# Set to 1 to run all combinations everywhere, as for the published figures.
VARIABLE = "ABSORBED_MLA_FULL_GRID"


def grid(
    strength: int,
    dimensions: dict[str, Iterable],
    unless: Callable[[dict[str, object]], bool] = lambda combination: False,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with the combinations that are run.

    Args:
        strength: Number of dimensions whose values are combined in all ways in a covering array.
        dimensions: Values by argument of the test; a dict of values gives them labels.
        unless: Whether a combination makes no sense, and is left out.
        indirect: Arguments that are fixtures.
    """
    named = {n: v if isinstance(v, dict) else {str(x): x for x in v} for n, v in dimensions.items()}

    def values(row: tuple[str, ...]) -> dict[str, object]:
        return {name: named[name][label] for name, label in zip(named, row)}

    rows = [row for row in itertools.product(*named.values()) if not unless(values(row))]
    if thinned():
        rows = covering(rows, max(1, strength - world.size() // 4))
    return pytest.mark.parametrize(
        [*named],
        [tuple(values(row).values()) for row in rows],
        ids=["-".join(row) for row in rows],
        indirect=indirect,
    )


def thinned() -> bool:
    """Whether covering arrays are run instead of all combinations."""
    return not torch.cuda.is_available() and os.environ.get(VARIABLE) != "1"


def without(names: Iterable[str], *left_out: str) -> list[str]:
    """Names of cases, on a CPU without those that take the same way through the code as others."""
    return [name for name in names if not (thinned() and name in left_out)]


# For whole models and engines: more ranks run the same code.
few_ranks = pytest.mark.skipif(
    thinned() and world.size() > 2, reason=f"needs 1 or 2 processes ({VARIABLE}=1: any)"
)
# For those that tests/unit and tests/conversion have in one process.
two_ranks = pytest.mark.skipif(
    thinned() and world.size() != 2, reason=f"needs 2 processes ({VARIABLE}=1: any)"
)


def covering(rows: Sequence[tuple[str, ...]], strength: int) -> list[tuple[str, ...]]:
    """A few of the rows, in which any ``strength`` columns have all combinations of all rows.

    Greedy: each row taken adds the most combinations that are missing.
    """

    def parts(row: tuple[str, ...]) -> set[tuple]:
        return set(itertools.combinations(enumerate(row), min(strength, len(row))))

    missing = {row: parts(row) for row in rows}
    chosen = []
    while missing:
        best = max(missing, key=lambda row: len(missing[row]))
        found = missing[best]
        chosen.append(best)
        missing = {row: left for row, held in missing.items() if (left := held - found)}
    return chosen
