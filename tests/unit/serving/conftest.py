"""Tiny models that generate, one of each for every file that asks for it."""

import pytest


def made(**fields):
    # Tests of the server import none of this.
    from tests.support.engine import generating_model

    return generating_model(**fields)


@pytest.fixture(scope="module")
def model():
    return made(num_layers=1)


@pytest.fixture(scope="module")
def drafting():
    """With two MTP layers."""
    return made(num_layers=1, mtp_num_layers=2)
