"""scripts/checks/training_recipes.py in one process: it runs, and it can fail."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checks import training_recipes
from checks.recipes import table
from checks.recipes.compare import Comparison, differences
from checks.recipes.recipe import EXACT, ROUNDING, Outcome, Row
from tests.support import world
from tests.support.environment import without_launcher

SCRIPT = Path(training_recipes.__file__)
RECIPES = {recipe.name: recipe for recipe in table.all_recipes()}
DISTRIBUTED = RECIPES["distributed optimizer"]


class OneRank:
    """What a Comparison asks its ranks."""

    size = 1

    def first_error(self, error: str) -> str:
        return error

    def gathered(self, value):
        return [value]

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Comparison:
    args = argparse.Namespace(begin=time.monotonic(), time_limit=600.0)
    return Comparison(OneRank(), tmp_path_factory.mktemp("weights"), args)


@pytest.mark.usefixtures("forked_python")
def test_as_a_command(tmp_path):
    """In a process of its own, whose recipes of two processes say so."""
    report = tmp_path / "new" / "recipes.json"
    command = [sys.executable, str(SCRIPT), "--only", "distributed optimizer", "plain TP"]
    command += ["--json", str(report), "--device", "cpu"]
    done = subprocess.run(command, env=without_launcher(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["recipe"]: row for row in json.loads(report.read_text())["rows"]}
    assert rows["distributed optimizer"]["equal"] and rows["distributed optimizer"]["losses"] == 0
    assert rows["plain TP"]["verdict"] == "cannot run here: it needs 2 processes"
    assert "distributed optimizer (DP 2): ok" in done.stdout


def test_unknown_names():
    with pytest.raises(ValueError, match=r"--only must name some of plain DP; .*; got 'plane'"):
        training_recipes._chosen(["plane"])


def test_names_are_those_of_one_recipe_each():
    recipes = table.all_recipes()
    assert len(RECIPES) == len(recipes)
    assert all(recipe.reference is not None for recipe in recipes)


@pytest.mark.skipif(world.size() > 1, reason="one process")
class TestFailures:
    """Each is what a fault of the attention under a recipe would look like."""

    def perturbed(self, chunks) -> str:
        with torch.no_grad():
            next(chunks[0].parameters()).view(-1)[0] += 1e-3
        return ""

    def test_other_weights(self, comparison):
        recipe = replace(DISTRIBUTED, name="perturbed", note=self.perturbed)
        row = comparison.row(recipe)
        assert row.failed and not row.equal and row.weights > 0
        assert row.verdict == "FAILED" and "FAILED" in row.line()
        assert row.tolerances == EXACT and row.weight == "0.embedding.word_embeddings.weight"

    def test_an_error(self, comparison):
        def fails(recipe):
            raise RuntimeError("nothing is here")

        row = comparison.row(replace(DISTRIBUTED, name="fails", run=fails))
        assert row.failed and row.error == "RuntimeError: nothing is here"
        assert "nothing is here" in row.traceback
        assert not comparison.row(DISTRIBUTED).failed, "the others go on"

    def test_the_plain_run_differs_from_itself(self, comparison):
        """Then recipes are compared within rounding."""
        runs = []

        def noisy(recipe):
            runs.append(recipe)
            return Outcome([1.0], {"w": torch.tensor([1.0 + 1e-5 * len(runs)])})

        plain = replace(DISTRIBUTED.reference, name="noisy", run=noisy)
        row = comparison.row(plain.variant("beside noise", exact=True))
        assert not row.failed and row.tolerances == ROUNDING["float32"]
        assert "differs from itself" in row.note


WEIGHTS = {"a": torch.ones(4), "b": torch.ones(2)}


class TestDifferences:
    def test_equal(self):
        one = Outcome([1.0, 2.0], WEIGHTS)
        assert differences(one, one) == (0.0, 0.0, "a", True)

    def test_the_worst(self):
        found = Outcome([1.0, 2.2], {**WEIGHTS, "b": torch.tensor([1.0, 1.5])})
        losses, weights, name, equal = differences(found, Outcome([1.0, 2.0], WEIGHTS))
        assert losses == pytest.approx(0.1) and weights == pytest.approx(0.5 / math.sqrt(2))
        assert name == "b" and not equal

    def test_nan(self):
        found = Outcome([1.0], {**WEIGHTS, "a": torch.full((4,), math.nan)})
        losses, weights, name, _ = differences(found, Outcome([1.0], WEIGHTS))
        assert math.isnan(weights) and name == "a"
        row = Row("r", "DP 2", losses=losses, weights=weights, tolerances=(1.0, 1.0))
        assert row.failed

    @pytest.mark.parametrize(
        "other",
        [Outcome([1.0], {"a": torch.ones(4)}), Outcome([], WEIGHTS)],
        ids=["weight", "loss"],
    )
    def test_missing(self, other):
        with pytest.raises(ValueError, match="weights of one run only"):
            differences(other, Outcome([1.0], WEIGHTS))

    def test_no_whole_weights(self):
        with pytest.raises(Exception, match="no whole weights: because"):
            differences(Outcome([], {}, "because"), Outcome([], {}, WEIGHTS))
