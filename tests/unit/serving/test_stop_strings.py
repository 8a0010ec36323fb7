"""Stop strings in a text that grows, beside a search of the whole text."""

import random

import pytest

from absorbed_mla import SamplingParams
from absorbed_mla.serving.stop_strings import StopStrings


def searched(text: str, before: int, strings: list[str]) -> tuple[int, str] | None:
    places = ((text.find(one, max(0, before - len(one) + 1)), one) for one in strings)
    return min((found for found in places if found[0] >= 0), default=None)


def held(text: str, strings: list[str]) -> int:
    ends = (i for one in strings for i in range(1, len(one)) if text.endswith(one[:i]))
    return max(ends, default=0)


@pytest.mark.parametrize("alphabet", ["ab", "abc", "aé€"])
def test_random_texts(alphabet):
    """Strings that overlap with themselves and each other, found or ignored, piece by piece."""
    draw = random.Random(alphabet)
    for _ in range(500):
        word = lambda most: "".join(draw.choices(alphabet, k=draw.randint(1, most)))  # noqa: E731
        strings, text = [word(5) for _ in range(draw.randint(0, 4))], ""
        stop_strings = StopStrings(strings)
        for _ in range(8):
            before, text = len(text), text + (word(3) if draw.random() < 0.9 else "")
            assert stop_strings.read(text) == searched(text, before, strings)
            assert stop_strings.held_back == held(text, strings)


def test_steps_cost_what_they_read(monkeypatch):
    """However many strings there are, and whatever they have in common with the text."""
    calls, node = [], type(StopStrings(["a"])._node)
    after = node.after
    monkeypatch.setattr(node, "after", lambda *args: calls.append(1) or after(*args))
    stop_strings = StopStrings(["a" * 32 + chr(0x100 + i) for i in range(64)])
    calls.clear()
    for length in range(1, 500):
        stop_strings.read("a" * length)
    assert len(calls) == 499


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a"] * 65},
        {"stop": ["a" * 4097]},
        {"stop": ["a" * 2000, "b" * 2097]},
        {"stop_token_ids": [1] * 257},
    ],
    ids=["strings", "characters", "of several", "tokens"],
)
def test_caps(fields):
    """Errors show the beginning of what was given."""
    with pytest.raises(ValueError, match=r"at most .* got ") as found:
        SamplingParams(**fields)
    assert len(str(found.value)) < 400
    [(name, value)] = fields.items()
    SamplingParams(**{name: value[:-1]})
