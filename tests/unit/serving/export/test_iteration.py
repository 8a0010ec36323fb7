"""Leaving an export: what a rank still does for the others, whenever it leaves."""

from itertools import islice

import pytest
import torch

from absorbed_mla.serving.export import iteration
from checkpoint_conversion.formats.base import Entry, Part
from checkpoint_conversion.lazy_tensor import LazyTensor

SIZES = (2, 1, 3, 2)
ENDS = [sum(SIZES[: i + 1]) for i in range(len(SIZES))]


@pytest.fixture
def done(monkeypatch) -> list:
    """What is collective, in order: agreements, and tensors by number."""
    calls: list = []
    monkeypatch.setattr(iteration, "_agree", lambda goes_on, device: calls.append(goes_on))
    return calls


def parts(done: list) -> list[Part]:
    def tensor(number: int) -> LazyTensor:
        def load(session) -> torch.Tensor:
            done.append(("load", number))
            return torch.full((1,), float(number))

        return LazyTensor((1,), torch.float32, load, frozenset(), 4)

    numbers = iter(range(sum(SIZES)))
    return [
        Part(f"part {i}", tuple(Entry(str(n), tensor(n)) for n in islice(numbers, size)), 4)
        for i, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("taken", range(sum(SIZES) + 1))
def test_after_some_tensors(done, taken):
    """It loads what is left of the part, and says that it leaves if any part is left."""
    weights = iteration.started(parts(done), torch.device("cpu"))
    for number in range(taken):
        name, tensor = next(weights)
        assert (name, float(tensor)) == (str(number), number)
    weights.close()
    begun = sum(taken > end for end in [0, *ENDS[:-1]])
    last = ENDS[begun - 1] if begun else 0
    assert [call for call in done if call not in (True, False)] == [
        ("load", number) for number in range(last)
    ]
    agreements = [call for call in done if call in (True, False)]
    assert agreements == [True] * begun + [False] * (begun < len(SIZES))


def test_to_the_end(done):
    """All parts were agreed on, and there is nobody to tell."""
    assert len(list(iteration.started(parts(done), torch.device("cpu")))) == sum(SIZES)
    assert [call for call in done if call in (True, False)] == [True] * len(SIZES)
