"""train.py: check the command line, then train."""

from __future__ import annotations

import logging

from console.script import run_script
from training.refusals import check_files, parse_own


def main(argv: list[str]) -> int:
    """Run train.py; returns the exit code of ``run_script``."""
    return run_script("train.py", lambda: run(argv))


def run(argv: list[str]) -> None:
    """Train once as the command line ``argv`` says; the process may train again afterwards.

    Raises:
        ValueError: If options are wrong or do not fit data or checkpoint.
    """
    check_files(parse_own(argv))
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Imported late, because Megatron takes seconds.
    from training import megatron_loop
    from training.arguments import parse_arguments
    from training.checks import validate_arguments
    from training.run import train

    args = parse_arguments(argv)
    validate_arguments(args)
    train(args)
    megatron_loop.finish()
