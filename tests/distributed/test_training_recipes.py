"""Some recipes of scripts/checks/training_recipes.py on two processes."""

from __future__ import annotations

import argparse
import time

import pytest

from checks.recipes import table
from checks.recipes.compare import Comparison
from tests.distributed.whole import of_all_ranks
from tests.support import needs, world
from tests.unit.scripts.checks.test_training_recipes import OneRank

pytestmark = [needs.processes(2), needs.no_gpu]

# Whole weights in another layout, a wrapper with shards.
NAMES = ("plain TP", "Megatron-FSDP, optim_grads_params")


class Ranks(OneRank):
    """The figures of this rank only are enough for a test.

    Errors are every rank's: one that fails alone would be in another collective than the others.
    """

    size = world.size()

    def first_error(self, error: str) -> str:
        errors = enumerate(of_all_ranks(error))
        return next((f"rank {rank}: {one}" for rank, one in errors if one), "")


@pytest.fixture(scope="module")
def comparison(module_folder):
    args = argparse.Namespace(begin=time.monotonic(), time_limit=600.0)
    return Comparison(Ranks(), module_folder, args)


@pytest.mark.parametrize("name", NAMES)
def test_recipe(name, comparison):
    [recipe] = (one for one in table.all_recipes() if one.name == name)
    row = comparison.row(recipe)
    assert not row.failed and not row.missing, row.line() + row.traceback
