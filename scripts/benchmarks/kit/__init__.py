"""What all benchmarks share: declared cases and options, timing, reports, tables and plots."""

from __future__ import annotations

import sys
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.kit import provenance
from benchmarks.kit.arguments import (
    DIMS,
    Option,
    declare,
    dims_of,
    flag,
    list_of,
    number,
    one,
    parse_sizes,
    sizes,
    some,
)
from benchmarks.kit.lazy import lazy
from benchmarks.kit.plot import Panel, collected
from benchmarks.kit.report import (
    Case,
    RanRow,
    Refused,
    Report,
    Row,
    TimedRow,
    Times,
    reason,
    refusing,
)
from benchmarks.kit.run import Benchmark, InTurns, main
from benchmarks.kit.tables import markdown_table, tokens_text
