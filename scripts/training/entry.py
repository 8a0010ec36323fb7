"""From the command line of train.py to its exit code."""

from __future__ import annotations

import logging
import warnings

from console.ranks import world_size
from console.script import run_script
from training.arguments import parse_arguments
from training.checkpoint_folder import find_checkpoint
from training.model_options import resolve_model
from training.validation import validate_arguments


def main(argv: list[str]) -> int:
    """Run the training script; returns the exit code, as ``run_script`` has it."""
    return run_script("train.py", lambda: _train(argv))


def _train(argv: list[str]) -> None:
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    args = parse_arguments(argv)
    if args.load:
        find_checkpoint(args.load)
    args.model = resolve_model(args)
    validate_arguments(args, world_size())
    # Imported late: Megatron takes seconds, and mistakes in the options are reported before.
    from training import distributed
    from training.run import train

    train(args)
    distributed.finish()
