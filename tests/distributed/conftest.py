"""Fixtures of tests with several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.whole import shared_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that all processes see."""
    with shared_folder() as path:
        yield path
