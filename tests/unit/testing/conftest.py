"""Fixtures that tests of DSA's own folder have, too."""

from tests.unit.dsa.conftest import _on_the_device

__all__ = ["_on_the_device"]
