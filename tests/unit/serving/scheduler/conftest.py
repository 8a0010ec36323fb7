"""The scheduler sees no layers: one is enough."""

import pytest

from tests.unit.serving.conftest import made


@pytest.fixture(scope="module")
def model():
    return made(num_layers=1)
