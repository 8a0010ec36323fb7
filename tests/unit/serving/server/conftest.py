"""Without the server's libraries its tests are not collected, which a GPU machine may lack."""

from importlib.util import find_spec

LIBRARIES = ("starlette", "uvicorn", "pydantic", "prometheus_client", "openai")
MISSING = [name for name in LIBRARIES if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    return f"tests of the server are left out: no {', '.join(MISSING)}" if MISSING else None
