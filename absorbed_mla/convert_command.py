"""``absorbed-mla-convert``: starts the command line of ``checkpoint_conversion``."""

from __future__ import annotations

import sys

from absorbed_mla.own_packages import require_own_packages


def main() -> int:
    """Run the command; returns its exit code, 3 (refused) if another package hides ours."""
    try:
        require_own_packages("checkpoint_conversion")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    from checkpoint_conversion.cli import main as run

    return run()
