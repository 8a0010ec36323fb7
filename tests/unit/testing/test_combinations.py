"""A thinned grid still holds every pair, or triple, of values."""

import itertools

import pytest

from tests.support import combinations
from tests.support.combinations import VARIABLE, covering, grid

DIMENSIONS = ("ab", "cd", "efg", "hi", "jklm")


def held(rows, strength: int) -> set:
    """All combinations of values that ``strength`` columns take in a row."""
    return {part for row in rows for part in itertools.combinations(enumerate(row), strength)}


@pytest.mark.parametrize("strength, at_most", [(1, 4), (2, 16), (3, 30), (5, 96), (9, 96)])
def test_covering(strength, at_most):
    rows = [*itertools.product(*DIMENSIONS)]
    chosen = covering(rows, strength)
    assert set(chosen) <= set(rows)
    assert held(chosen, min(strength, 5)) == held(rows, min(strength, 5))
    assert len(chosen) <= at_most


def test_what_makes_no_sense_is_left_out_and_all_the_rest_is_covered():
    rows = [row for row in itertools.product(*DIMENSIONS) if row[:2] != ("a", "c")]
    assert held(covering(rows, 2), 2) == held(rows, 2)


class TestGrid:
    @pytest.fixture(autouse=True)
    def _on_a_cpu(self, monkeypatch):
        monkeypatch.setattr(combinations.torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv(VARIABLE, raising=False)

    def rows(self) -> list:
        dimensions = {"on": {"no": False, "yes": True}, "n": [1, 2], "m": [1, 2]}
        mark = grid(2, dimensions, unless=lambda row: row["on"] and row["n"] == row["m"] == 1)
        names, values = mark.args
        assert (names, len(values)) == (["on", "n", "m"], len(mark.kwargs["ids"]))
        assert dict(zip(mark.kwargs["ids"], values))["yes-1-2"] == (True, 1, 2)
        return values

    def test_thinned(self):
        assert 4 <= len(self.rows()) < 7

    def test_whole_if_asked_for(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "1")
        assert len(self.rows()) == 7

    def test_whole_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(combinations.torch.cuda, "is_available", lambda: True)
        assert len(self.rows()) == 7
