"""Run recipes, each beside its reference, and measure how far apart they end on all ranks."""

from __future__ import annotations

import argparse
import gc
import os
import re
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.cpu_host import enable_cpu_host
from benchmarks.kit.command import ALONE
from benchmarks.kit.report import Refused, reason
from checks.recipes.model import dtype_of, write_first_weights
from checks.recipes.recipe import EXACT, ROUNDING, Outcome, Recipe, Row
from tests.support import world


class Ranks:
    """All of torchrun's processes, or one alone; over NCCL where there are GPUs, else gloo.

    Errors and figures go over a gloo group, which does not involve the GPUs.
    """

    def __init__(self) -> None:
        for name, value in ALONE.items():
            os.environ.setdefault(name, value)
        self.on_gpu = not enable_cpu_host()
        world.start()
        self.size = dist.get_world_size()
        self._host_group = dist.new_group(backend="gloo")

    def first_error(self, error: str) -> str:
        """The first rank's error that has one; "" if no rank has."""
        named = [f"rank {rank}: {one}" for rank, one in enumerate(self.gathered(error)) if one]
        return named[0] if named else ""

    def gathered(self, value: object) -> list:
        """What every rank has."""
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def synchronize(self) -> None:
        """Wait for the GPU, so that its errors are those of the work before."""
        if self.on_gpu:
            torch.cuda.synchronize()


class Comparison:
    """Recipes of one job, whose references run once.

    All ranks see the folder, which is for checkpoints; the arguments have ``begin`` and
    ``time_limit``.
    """

    def __init__(self, ranks: Ranks, folder: Path, args: argparse.Namespace) -> None:
        self._ranks, self._folder, self._args = ranks, folder, args
        self._outcomes: dict[str, Outcome] = {}
        self._failed: dict[str, str] = {}

    def row(self, recipe: Recipe) -> Row:
        """The row of a recipe, whatever goes wrong in it."""
        row = Row(recipe.name, recipe.layout.name, missing=self._missing(recipe))
        begin = time.monotonic()
        if not row.missing:
            self._measure(recipe, row)
        row.seconds = time.monotonic() - begin
        return row

    def _missing(self, recipe: Recipe) -> str:
        """Why it is left out; the same on all ranks."""
        if recipe.layout.least > self._ranks.size:
            return f"it needs {recipe.layout.least} processes"
        late = time.monotonic() - self._args.begin > self._args.time_limit
        if any(self._ranks.gathered(late)):
            return f"{self._args.time_limit:g} s are over (--time-limit)"
        return recipe.missing()

    def _measure(self, recipe: Recipe, row: Row) -> None:
        reference = recipe.reference
        assert reference is not None
        row.reference = f"{reference.name} ({reference.layout.name})"
        row.tolerances = EXACT if recipe.exact else _rounding(recipe)
        try:
            expected, found = self._outcome(reference), self._outcome(recipe)
            figures = self._ranks.gathered(differences(found, expected))
            if recipe.exact and not all(one[3] for one in figures):
                self._allow_noise(recipe, row)
        except Exception as error:
            row.error = reason(error)
            row.traceback = _end_of_traceback()
            return
        losses, weights, names, equal = zip(*figures)
        row.losses, row.weights, row.equal = _largest(losses), _largest(weights), all(equal)
        row.weight = next(one for one, size in zip(names, weights) if not size < row.weights)
        row.note = "; ".join(filter(None, (found.note, row.note)))

    def _allow_noise(self, recipe: Recipe, row: Row) -> None:
        """Compare within rounding where the reference differs from itself, and say so.

        Kernels for GPUs may sum in an order that differs between runs.
        """
        reference = recipe.reference
        again = replace(reference, name=f"{reference.name}, again")
        figures = self._ranks.gathered(differences(self._outcome(again), self._outcome(reference)))
        if not all(one[3] for one in figures):
            row.tolerances = _rounding(recipe)
            noise = _largest(one[1] for one in figures)
            row.note = f"the plain run differs from itself by {noise:.1e}"

    def _outcome(self, recipe: Recipe) -> Outcome:
        """A run, once.

        Raises:
            Refused: On every rank if it fails on any.
        """
        if recipe.name in self._failed:
            raise Refused(f"{recipe.name}: {self._failed[recipe.name]}")
        if recipe.name not in self._outcomes:
            error, cause = "", None
            try:
                write_first_weights(recipe, self._folder)
                outcome = recipe.run(recipe)
                self._ranks.synchronize()
            except Exception as problem:
                error, cause = reason(problem), problem
            gc.collect()
            first = self._ranks.first_error(error)
            if first:
                self._failed[recipe.name] = first
                raise Refused(first) from cause
            self._outcomes[recipe.name] = outcome
        return self._outcomes[recipe.name]


def differences(found: Outcome, expected: Outcome) -> tuple[float, float, str, bool]:
    """Largest relative difference of losses and of weights, that weight's name, and equality.

    Raises:
        ValueError: If they have other losses or weights.
    """
    ours, theirs = _weights(found, expected)
    if len(found.losses) != len(expected.losses) or ours.keys() != theirs.keys():
        raise ValueError(
            f"{len(found.losses)} losses and {len(expected.losses)}; weights of one run only: "
            f"{sorted(ours.keys() ^ theirs.keys())}"
        )
    losses = [relative(*map(torch.tensor, pair)) for pair in zip(found.losses, expected.losses)]
    weights = {name: relative(ours[name], theirs[name]) for name in ours}
    worst = max(weights, key=lambda name: _order(weights[name]), default="")
    equal = found.losses == expected.losses and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    return _largest(losses), weights.get(worst, 0.0), worst, equal


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.double(), expected.double()
    norm = float(expected.norm())
    return float((found - expected).norm()) / (norm or 1.0)


def _weights(
    found: Outcome, expected: Outcome
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Whole weights where both runs have them, else this rank's."""
    for why in (found.whole, expected.whole):
        if isinstance(why, str):
            raise Refused(f"no whole weights: {why}")
    if found.whole and expected.whole:
        return found.whole, expected.whole
    return found.tensors, expected.tensors


def _end_of_traceback() -> str:
    """Of the exception being handled; of files only folder and name, the same on every machine."""
    lines = traceback.format_exc().splitlines()[-40:]
    return re.sub(r'File "[^"]*?([^/"]+/[^/"]+)"', r'File "\1"', "\n".join(lines))


def _largest(values) -> float:
    return max(values, key=_order, default=0.0)


def _order(value: float) -> float:
    """NaN is the largest."""
    return float("inf") if value != value else value


def _rounding(recipe: Recipe) -> tuple[float, float]:
    return ROUNDING[str(dtype_of(recipe)).removeprefix("torch.")]
