"""How many files of the package a reader has to open to follow a forward, a step or a request."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_the_way_is_short(form):
    """At most 16 files for a training forward and 14 for a decode; the script's own bounds.

    A decode step of ``LLM`` enters at most 21 at depth 14, a request to the server at most 38.
    """
    command = [sys.executable, str(ROOT / "scripts" / "checks" / "trace_files.py"), "--form", form]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = dict(re.findall(r"^(\w[\w ]*\w) +(\d+) files", done.stdout, re.MULTILINE))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{found['training forward']} files in the {form} form" in readme
    assert f"a decode step {found['decode']}, one of `LLM` {found['LLM decode step']}" in readme
    assert f"a server request {found['server request']} (" in readme
