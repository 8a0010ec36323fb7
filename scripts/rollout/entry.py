"""From the command line of rollout_train.py to its exit code."""

from __future__ import annotations

import logging
import warnings

from console.ranks import world_size
from console.script import run_script
from rollout.arguments import parse_arguments


def main(argv: list[str]) -> int:
    """Run the script; returns the exit code.

    As ``run_script`` has it: 1 if parity mode was asked for and there is a gap, too.
    """
    return run_script("rollout_train.py", lambda: _rollout_train(argv))


def _rollout_train(argv: list[str]) -> None:
    args = parse_arguments(argv, world_size())
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    for name in ("megatron", "DynamicInferenceEngine"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Only here: the imports take seconds, and mistakes are told before.
    from rollout.run import rollout_train
    from training import distributed

    rollout_train(args)
    distributed.finish()
