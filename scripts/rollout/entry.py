"""From the command line of rollout_train.py to its exit code."""

from __future__ import annotations

import logging

from console.ranks import world_size
from console.script import run_script
from rollout.arguments import parse_arguments


def main(argv: list[str]) -> int:
    """Run the script; returns ``run_script``'s exit code, and 1 for a gap in parity mode."""
    return run_script("rollout_train.py", lambda: _rollout_train(argv))


def _rollout_train(argv: list[str]) -> None:
    args = parse_arguments(argv, world_size())
    for name in ("megatron", "DynamicInferenceEngine"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Imported late, because it takes seconds: a wrong command line is reported at once.
    from training import megatron_loop  # first: it has Megatron imported as is quick on a CPU

    # isort: split
    from rollout.run import rollout_train

    rollout_train(args)
    megatron_loop.finish()
