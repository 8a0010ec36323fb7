"""The list of ``scripts/run_tests.sh --quick`` names tests that there are."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_line_names_a_test():
    """With other parameters than the test has, pytest says so when the list is run."""
    lines = (ROOT / "tests/quick.txt").read_text().splitlines()
    tests = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    assert len(tests) > 20 and len({tuple(row) for row in tests}) == len(tests)
    for processes, test in tests:
        assert processes in ("1", "2"), test
        path, *names = test.split("[")[0].split("::")
        body = ast.parse((ROOT / path).read_text()).body
        for name in names:
            [found] = [node for node in body if getattr(node, "name", None) == name]
            body = found.body
