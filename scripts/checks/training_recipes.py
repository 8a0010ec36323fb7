#!/usr/bin/env python3
"""Train the same small model in all the ways that users combine with this attention, and compare.

    $ torchrun --nproc-per-node 2 scripts/checks/training_recipes.py --json recipes.json
    $ torchrun --nproc-per-node 2 scripts/checks/training_recipes.py --only "plain DP" "plain TP"

Every recipe trains five steps from the same weights on the same tokens: over NCCL in bfloat16 with
TransformerEngine's layers where there are GPUs and it is installed, over gloo in float32 with local
layers else. Its losses and weights must be those of the plain run in the same layout of the ranks,
to the bit or within rounding; the plain run's, those of one process. A recipe that fails is
reported, and the others go on; only if one rank alone fails in the middle of a step, the run ends
after 120 s. The exit code is 1 if a recipe has failed, 2 after wrong input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.report import write_json
from console.parser import Parser
from console.ranks import rank
from console.script import leave, run_script

if TYPE_CHECKING:
    from checks.recipes.recipe import Recipe, Row

SCRIPT = "training_recipes.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipes; returns the exit code."""
    return run_script(SCRIPT, lambda: _run(_parse(argv)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(SCRIPT, __doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=[], help="names of recipes (default: all)"
    )
    arguments.add_common(parser, **{"--json": None, "--device": None, "--time-limit": 600.0})
    return arguments.parse(parser, argv)


def _run(args: argparse.Namespace) -> int:
    arguments.use_device(args.device)
    # Only here, so that --help needs no torch.
    from checks.recipes.compare import Comparison, Ranks
    from checks.recipes.model import backend
    from tests.distributed.whole import shared_folder
    from tests.support import world

    ranks = Ranks()
    dtype = "bfloat16" if ranks.on_gpu else "float32"
    about = provenance.describe(ranks.on_gpu, dtype, layers=backend(), processes=ranks.size)
    rows: list[Row] = []
    with ExitStack() as stack:
        stack.callback(world.stop)
        comparison = Comparison(ranks, stack.enter_context(shared_folder()), args)
        for recipe in _chosen(args.only):
            rows.append(comparison.row(recipe))
            if not rank():
                print(rows[-1].line(), flush=True)
                if args.json:
                    write_json(
                        args.json, {"environment": about, "rows": [r.as_json() for r in rows]}
                    )
    return int(any(row.failed for row in rows))


def _chosen(only: Sequence[str]) -> list[Recipe]:
    from checks.recipes.table import all_recipes

    recipes = {recipe.name: recipe for recipe in all_recipes()}
    unknown = [name for name in only if name not in recipes]
    if unknown:
        raise ValueError(f"--only must name some of {'; '.join(recipes)}; got {unknown[0]!r}")
    return [recipes[name] for name in only or recipes]


if __name__ == "__main__":
    leave(main())
