"""Parametrization by a grid: all combinations of its dimensions, or a covering array of them.

With one or two processes, or on a GPU, all of them. More processes run the same code with other
numbers of ranks, and each combination costs more: on a CPU they run a covering array, in which any
two dimensions, or any three, still meet in every combination of their values.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from tests.support import world

# 1: all combinations everywhere, as published figures have them.
VARIABLE = "ABSORBED_MLA_FULL_GRID"


def grid(
    strength: int,
    dimensions: dict[str, Iterable],
    unless: Callable[[dict[str, object]], bool] = lambda combination: False,
    indirect: Sequence[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test with the combinations that are run.

    Args:
        strength: How many dimensions still meet in all ways where not all combinations are run.
        dimensions: Values by the name of the test's argument; a dict names them, too.
        unless: Which combinations make no sense.
        indirect: Arguments that are fixtures.
    """
    named = {n: v if isinstance(v, dict) else {str(x): x for x in v} for n, v in dimensions.items()}

    def values(row: tuple[str, ...]) -> dict[str, object]:
        return {name: named[name][label] for name, label in zip(named, row)}

    rows = [row for row in itertools.product(*named.values()) if not unless(values(row))]
    if thinned():
        rows = covering(rows, strength)
    return pytest.mark.parametrize(
        [*named],
        [tuple(values(row).values()) for row in rows],
        ids=["-".join(row) for row in rows],
        indirect=indirect,
    )


def thinned() -> bool:
    """Whether less than all combinations are run."""
    return world.size() > 2 and not torch.cuda.is_available() and os.environ.get(VARIABLE) != "1"


# For whole models and engines: more ranks run the same code.
few_ranks = pytest.mark.skipif(thinned(), reason=f"needs 1 or 2 processes ({VARIABLE}=1: any)")


def covering(rows: Sequence[tuple[str, ...]], strength: int) -> list[tuple[str, ...]]:
    """Few of the rows, in which any ``strength`` columns hold whatever they hold in all rows.

    They are taken one by one, always one that adds most.
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
