"""From the command line of generate.py to its exit code."""

from __future__ import annotations

import logging
import sys
import warnings

from console.ranks import world_size
from console.script import run_script
from generation.arguments import parse_arguments
from training.checkpoint import find_checkpoint


def main(argv: list[str]) -> int:
    """Run the script; returns ``run_script``'s exit code, and 1 if a prompt failed."""
    # Models write characters that the locale may not have.
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    return run_script("generate.py", lambda: _generate(argv))


def _generate(argv: list[str]) -> int:
    args = parse_arguments(argv, world_size())
    find_checkpoint(args.load)
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Imported late, because it takes seconds: a wrong command line is reported at once.
    from training import megatron_loop  # first: it has Megatron imported as is quick on a CPU

    # isort: split
    from generation.run import generate

    code = generate(args)
    megatron_loop.finish()
    return code
