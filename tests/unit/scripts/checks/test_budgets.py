"""Lines and words against their budgets, in a small repository made for it."""

import pytest

from checks.budgets import Budget, report


@pytest.fixture
def root(tmp_path):
    for name, text in {
        "package/one.py": "a = 1\nb = 2\n",
        "package/deep/two.py": "c = 3\n",
        "package/notes.md": "not counted\n",
        "docs/index.md": "three words here\n",
        "docs/measurements/table.md": "many " * 100,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("most, kept", [(3, True), (2, False)])
def test_lines(root, most, kept):
    [line], found = report(root, (Budget("package", "lines", most, 1),))
    assert line.split()[:3] == ["package", "3", "lines"] and ("TOO MANY" in line) is not kept
    assert "to become 1" in line and found is kept


@pytest.mark.parametrize("most, kept", [(3, True), (2, False)])
def test_words(root, most, kept):
    budget = Budget("docs", "words", most, most, but_not="docs/measurements")
    [line], found = report(root, (budget,))
    assert line.split()[:3] == ["docs", "3", "words"] and "to become" not in line
    assert found is kept
