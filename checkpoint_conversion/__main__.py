"""``python -m checkpoint_conversion``."""

import sys

from checkpoint_conversion.cli import main

sys.exit(main())
