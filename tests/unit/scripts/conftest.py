"""Tests of scripts import them as the scripts import each other: from the folder scripts/."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))
