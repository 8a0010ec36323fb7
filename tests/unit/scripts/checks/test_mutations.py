"""The list of ``scripts/checks/mutations`` fits the sources, so that the check can run.

Here nothing is broken. The check itself takes minutes for each mutation, all tests of one process
and of two until the first fails, on copies of the checkout::

    python scripts/checks/mutation_check.py                            # every mutation
    python scripts/checks/mutation_check.py tile_offset varlen_alignment # these
    python scripts/checks/mutation_check.py tile_offset \\
        --tests tests/unit/core_attention/masks/test_tiles.py
    python scripts/checks/mutation_check.py k_rope_reduction_sp k_rope_reduction_no_sp \\
        --tests tests/distributed/test_finalize_gradients.py --processes 2
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from checks import mutation_check
from checks.mutations import MUTATIONS
from checks.mutations.mutation import Mutation

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", MUTATIONS)
def test_fits_the_sources(name):
    """Once, or what is broken depends on the order of the file; still Python, or any test fails."""
    mutation = MUTATIONS[name]
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.right) == 1
    broken = source.replace(mutation.right, mutation.wrong)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


def test_a_stale_line_is_an_error(tmp_path):
    target = tmp_path / "module.py"
    target.write_text("value = 1\n")
    mutation_check.mutate(target, Mutation("module.py", "value = 1", "value = 2"))
    assert target.read_text() == "value = 2\n"
    with pytest.raises(SystemExit, match="update the list"):
        mutation_check.mutate(target, Mutation("module.py", "value = 1", "value = 2"))
