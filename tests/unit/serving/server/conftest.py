"""Without the server's libraries its tests are not collected, which a GPU machine may lack."""

from importlib.util import find_spec

import pytest

LIBRARIES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "openai")
MISSING = [name for name in LIBRARIES if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    return f"tests of the server are left out: no {', '.join(MISSING)}" if MISSING else None


@pytest.fixture
def served():
    from tests.support.llm import serving

    with serving() as made:
        yield made


@pytest.fixture(scope="module")
def client(served):
    """OpenAI's, of a server that lives as long as a module."""
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as made:
        yield made
