"""The tables of ``scripts/checks/mutations`` fit the sources; mutation_check.py breaks them."""

import ast
from pathlib import Path

import pytest

from checks import mutation_check
from checks.mutations import MUTATIONS
from checks.mutations.table import Mutation, read

ROOT = Path(__file__).resolve().parents[4]


def test_fit_the_sources():
    """Once, or what is broken depends on the order of the file; still Python, or any test fails."""
    for name, mutation in MUTATIONS.items():
        source = (ROOT / mutation.file).read_text()
        assert source.count(mutation.right) == 1 and mutation.right != mutation.wrong, name
        ast.parse(source.replace(mutation.right, mutation.wrong), name)


def test_a_stale_line_is_an_error(tmp_path):
    target = tmp_path / "module.py"
    target.write_text("value = 1\n")
    mutation_check.mutate(target, Mutation("module.py", "value = 1", "value = 2"))
    assert target.read_text() == "value = 2\n"
    with pytest.raises(SystemExit, match="update the list"):
        mutation_check.mutate(target, Mutation("module.py", "value = 1", "value = 2"))


def test_tests_that_are_not_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mutation_check.py", "--tests", "tests", "tests/no.py::test"])
    assert mutation_check.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "which has no tests/no.py::test" in error


def test_ways_to_write_a_mutation():
    of_f = "f.py\n  a: x = 1 ->\n  b: y\n    -> z\n  c:\n    - u\n    |  v\n    -> w\n"
    table = read(of_f + "g.py\n  d: x -> y")
    assert table == {
        "a": Mutation("f.py", "x = 1", ""),
        "b": Mutation("f.py", "y", "z"),
        "c": Mutation("f.py", "u\n  v", "w"),
        "d": Mutation("g.py", "x", "y"),
    }
    with pytest.raises(ValueError, match="two mutations are named a"):
        read("f.py\n  a: x -> y\n  a: y -> z")
