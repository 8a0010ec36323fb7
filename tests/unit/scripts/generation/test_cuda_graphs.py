"""generate.py --cuda-graphs: the options that it refuses."""

from __future__ import annotations

import pytest

from generation.arguments import parse_arguments, with_model
from generation.model import check_graphs

DENSE = ("--num-experts", "0")


def parsed(*words: str, processes: int = 1):
    """Arguments of a command line and the model that they describe."""
    return with_model(parse_arguments(["--load", "x", "--preset", "tiny", *words], processes))


@pytest.fixture
def gpu(monkeypatch):
    """As far as the check looks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="--cuda-graphs needs a GPU"):
        check_graphs(parsed("--cuda-graphs"))
    check_graphs(parsed("--form", "expanded"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--form", "expanded"), "--form auto or absorbed, got expanded"),
        (("--moe-token-dispatcher-type", "allgather"), "alltoall, got allgather"),
    ],
)
def test_refused(gpu, words, error):
    with pytest.raises(ValueError, match=error):
        check_graphs(parsed("--cuda-graphs", *words))


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ((), 1),
        (("--sequence-parallel",), 2),
        (("--batch-invariant", "--bf16", "--form", "absorbed"), 2),
        # There are no tokens to dispatch.
        ((*DENSE, "--moe-token-dispatcher-type", "allgather"), 1),
    ],
)
def test_accepted(gpu, words, processes):
    check_graphs(parsed("--cuda-graphs", *words, processes=processes))
