"""Check of error messages: they name the argument, what it got and what it accepts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refusal(*parts: str) -> Iterator[None]:
    """The block raises a ValueError, or torch's error, whose message holds every part."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        yield
    for part in parts:
        assert part in str(caught.value)
