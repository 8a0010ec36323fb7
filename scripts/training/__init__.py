"""The training example ``scripts/train.py``; start reading with ``run.py``."""

import sys
from pathlib import Path

from absorbed_mla.own_packages import require_own_packages
from console.errors import report

try:
    require_own_packages("checkpoint_conversion", "specs")
except ValueError as error:
    # Every script that imports this package would fail on its next import.
    sys.exit(report(Path(sys.argv[0]).name, str(error), 2))
