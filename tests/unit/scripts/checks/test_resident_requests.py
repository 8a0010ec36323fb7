"""scripts/checks/resident_requests.py: FP8 latents let more requests run at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checks import resident_requests

DATA = Path(resident_requests.__file__).parents[2] / "docs/measurements"
PUBLISHED = DATA / "inference/resident-requests.json"


def test_at_once(monkeypatch):
    """The engine's own steps, with short requests."""
    monkeypatch.setattr(resident_requests, "_REQUESTS", 14)
    # The tests' process is in a world already.
    monkeypatch.setattr("tests.support.world.start", lambda: None)
    # Of 64 tokens, with room for 7 requests in bf16 (a block beside them is the engine's).
    plain, fp8 = resident_requests.measure(64, 8.5 * 64 * 1152 / 2**30)
    assert (plain["bytes_per_token"], fp8["bytes_per_token"]) == (1152, 656)
    assert abs(plain["buffer_mib"] - fp8["buffer_mib"]) < 0.1
    assert (plain["at_once"], fp8["at_once"]) == (7, 13)


def test_published_figures():
    plain, fp8 = json.loads(PUBLISHED.read_text())["rows"]
    assert fp8["at_once"] >= 1.6 * plain["at_once"]
    assert fp8["of_bf16"] == fp8["at_once"] / plain["at_once"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "100"], "--tokens must be a multiple of 64, got 100"),
        (["--buffer-gb", "nan"], "--buffer-gb must be above 0 and below 16, got nan"),
    ],
)
def test_mistakes(options, message, capsys):
    assert resident_requests.main(options) == 2
    assert message in capsys.readouterr().err
