"""The process that all training programs are forked from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_server import JobServer


@pytest.fixture(scope="session")
def server() -> Iterator[JobServer]:
    """Has imported what scripts/train.py does."""
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    with JobServer(["training.run"], [scripts]) as server:
        yield server
