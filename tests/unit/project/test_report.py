"""What scripts/run_tests.sh prints at the end of a run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import report

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import time, pytest

@pytest.fixture(scope="module")
def prepared():
    time.sleep(0.4)

def test_slow(prepared): ...

def test_quick(prepared): ...

@pytest.mark.skipif(True, reason="needs a GPU")
@pytest.mark.parametrize("n", range(3))
def test_elsewhere(n): ...

def test_inside():
    pytest.skip("needs a mount")

@pytest.mark.xfail
def test_known():
    assert False
"""
MODULE = "import pytest\npytest.skip('needs a GPU', allow_module_level=True)\n"


def test_of_a_run(tmp_path):
    """With and without pytest-xdist, whose processes must not each write."""
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "conftest.py").write_text(
        "from tests.support.report import record\n"
        "def pytest_configure(config):\n    record(config)\n"
    )
    parallel = ["-p", "xdist", "-n", "2"] if importlib.util.find_spec("xdist") else []
    for name, more in {"unit": parallel, "training": []}.items():
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            report.VARIABLE: str(tmp_path / f"{name}.jsonl"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more]
        done = subprocess.run(
            [*command, "--rootdir", tmp_path, tmp_path],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    lines = report.summary([tmp_path / "unit.jsonl", tmp_path / "training.jsonl"])
    [slowest, skipped] = [number for number, line in enumerate(lines) if line.endswith(":")]
    first = lines[slowest + 1].split()
    assert float(first[0][:-1]) > 0.35 and first[1] in ("unit", "training")
    assert first[2].startswith("test_some.py::test_")
    assert [line.split(maxsplit=1) for line in lines[skipped + 1 :]] == [
        ["8", "needs a GPU"],
        ["2", "needs a mount"],
    ]


def test_of_nothing(tmp_path):
    (tmp_path / "unit.jsonl").touch()
    assert report.summary([tmp_path / "unit.jsonl"]) == []


def test_failed_tests_are_listed(tmp_path):
    rows = [
        {"test": "a.py::test_x", "outcome": "failed", "seconds": 0.1, "reason": "assert 1 == 2"},
        {"test": "a.py::test_y", "outcome": "passed", "seconds": 0.2, "reason": ""},
    ]
    (tmp_path / "unit.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = report.summary([tmp_path / "unit.jsonl"])
    assert lines[-2:] == ["failed tests:", "  unit  a.py::test_x: assert 1 == 2"]
