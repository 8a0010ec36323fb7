"""train.py: check the command line, then train."""

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
    """Run train.py; returns the exit code of ``run_script``."""
    return run_script("train.py", lambda: run(argv))


def run(argv: list[str]) -> None:
    """Train once as the command line ``argv`` says; the process may train again afterwards.

    Raises:
        ValueError: If options are wrong or do not fit data or checkpoint.
    """
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    args = parse_arguments(argv)
    if args.load:
        find_checkpoint(args.load)
    args.model = resolve_model(args)
    validate_arguments(args, world_size())
    # Imported late, because Megatron takes seconds and mistakes in options are reported at once.
    from training import distributed
    from training.run import train

    train(args)
    distributed.finish()
