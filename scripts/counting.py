"""Texts that count in words, which a small model can learn and a reader can check.

A text begins at any number, and zero follows ninety-nine:

    ninety-eight, ninety-nine, zero, one, two, three, four, five, ...
"""

from __future__ import annotations

import random
import re
from pathlib import Path

_SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen"),
    *("sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = (*_SMALL, *(f"{ten}-{one}".removesuffix("-zero") for ten in _TENS for one in _SMALL[:10]))
_TEXTS = 200
_NUMBERS_PER_TEXT = 40


def write_texts(folder: Path) -> None:
    """Write the text files to train on; they are the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    first = random.Random(1)
    for number in range(_TEXTS):
        text = count_from(first.randrange(len(WORDS)), _NUMBERS_PER_TEXT)
        (folder / f"{number:03d}.txt").write_text(text + "\n")


def count_from(number: int, count: int) -> str:
    """``count`` numbers in words, beginning with ``number``."""
    return ", ".join(WORDS[(number + i) % len(WORDS)] for i in range(count))


def continuation(prompt: str, length: int) -> str:
    """The first ``length`` characters of the right continuation of ``prompt``.

    Raises:
        ValueError: If ``prompt`` does not end with a number, a comma and a space.
    """
    words = re.findall(r"[\w-]+", prompt)
    if not words or words[-1] not in WORDS or not prompt.endswith(", "):
        raise ValueError(f"the prompt must end with a number and a comma, got {prompt!r}")
    # Every number has at least three letters.
    return count_from(WORDS.index(words[-1]) + 1, length // 3 + 1)[:length]


def right_numbers(text: str, prompt: str) -> tuple[int, int]:
    """How many complete numbers in ``text`` continue ``prompt`` rightly, and how many there are."""
    written = text.split(", ")[:-1]
    right = continuation(prompt, len(text) + 20 * len(written)).split(", ")
    return sum(a == b for a, b in zip(written, right)), len(written)


if __name__ == "__main__":
    from console.script import no_script

    no_script(__file__, __doc__)
