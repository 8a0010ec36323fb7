"""scripts/checks/parity_report.py around its measurements, which take minutes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checks import parity_report
from tests.support.environment import without_launcher

SCRIPTS = Path(parity_report.__file__).parents[1]
# Without what tests switch on for Megatron on a CPU.
ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from checks import parity_report
parity_report._differs = lambda *args: {"dense": [], "experts": []}
parity_report._times = lambda *args, **options: {"forward_ms": 1.0}
sys.exit(parity_report.main(["--device", "cpu", "--json", sys.argv[2]]))
"""


@pytest.mark.usefixtures("forked_python")
def test_starts_on_a_cpu(tmp_path):
    report = tmp_path / "new" / "parity.json"
    command = [sys.executable, "-c", ALONE, str(SCRIPTS), str(report)]
    done = subprocess.run(command, env=without_launcher(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(report.read_text()) == json.loads(done.stdout.splitlines()[-1])
    assert json.loads(report.read_text())["dtype"] == "float32"


def test_a_difference_is_an_error(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    report = {"differs": {"dense": [], "experts": ["decode"]}}
    monkeypatch.setattr(parity_report, "_report", lambda args: report)
    assert parity_report.main([]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == report
    assert err.startswith("parity_report.py: error: other bits than the training forward's: ")
    assert "'experts': ['decode']" in err and "dense" not in err
