"""A small model trained in all the ways that users combine with this attention, on two processes.

Every recipe trains five steps from the same weights on the same tokens: over NCCL in bfloat16 with
TransformerEngine's layers where there are GPUs and it is installed, over gloo in float32 with local
layers else. Its losses and weights must be those of the plain run in the same layout of the ranks,
to the bit or within rounding; the plain run's, those of one process.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.whole import of_all_ranks
from tests.support import needs
from tests.support.combinations import thinned
from tests.support.numerics import relative_error
from tests.support.recipes.model import dtype_of, write_first_weights
from tests.support.recipes.recipe import ROUNDING, Outcome, Recipe
from tests.support.recipes.table import all_recipes

pytestmark = needs.processes(2)
RECIPES = {recipe.name: recipe for recipe in all_recipes()}
# On a CPU whole weights in another layout, and a wrapper with shards.
NAMES = ("plain TP", "PyTorch's FSDP2") if thinned() else RECIPES


@pytest.fixture(scope="module")
def outcome_of(module_folder) -> Callable[[Recipe], Outcome]:
    """Runs a recipe, those of one name once."""
    known: dict[str, Outcome] = {}

    def run(recipe: Recipe) -> Outcome:
        if recipe.name not in known:
            write_first_weights(recipe, module_folder)
            known[recipe.name] = recipe.run(recipe)
        return known[recipe.name]

    return run


def differences(found: Outcome, expected: Outcome) -> list[float]:
    """The largest relative one of a loss, and of a weight (Frobenius), over all ranks."""
    sides = [one.whole if found.whole else one.tensors for one in (found, expected)]
    assert sides[0].keys() == sides[1].keys()
    losses = zip(found.losses, expected.losses, strict=True)
    own = (
        max(abs(one - other) / abs(other) for one, other in losses),
        max(relative_error(sides[0][name], sides[1][name]) for name in sides[0]),
    )
    return [max(values) for values in zip(*of_all_ranks(own))]


@pytest.mark.parametrize("name", NAMES)
def test_recipe(name, outcome_of):
    recipe = RECIPES[name]
    reference = recipe.reference
    assert reference is not None
    if missing := recipe.missing():
        pytest.skip(missing)
    found, expected = outcome_of(recipe), outcome_of(reference)
    bounds = ROUNDING[dtype_of(recipe)]
    if recipe.exact:
        # Kernels for GPUs may sum in an order that differs between runs.
        again = outcome_of(replace(reference, name=f"{reference.name}, again"))
        bounds = (0.0, 0.0) if not any(differences(again, expected)) else bounds
    losses, weights = differences(found, expected)
    assert losses <= bounds[0] and weights <= bounds[1], (losses, weights)
