"""generate.py: models that its processes cannot share."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from checkpoint_conversion import command_line
from generation.arguments import parse_arguments, with_model
from generation.model import check_model


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads 3 cannot be divided by"),
        (
            {"padded_vocab_size": 257},
            "vocab_size 257 cannot be divided by the number of processes 2. Pad",
        ),
    ],
    ids=["heads", "vocabulary"],
)
def test_refused(sizes, error):
    args = with_model(parse_arguments(["--load", "a folder", "--preset", "tiny"], 2))
    vars(args).update({"padded_vocab_size": 320, **sizes})
    with pytest.raises(ValueError, match=error) as refused:
        check_model(args)
    for command in re.findall(r"absorbed-mla-convert (.+);", str(refused.value)):
        assert command_line.parse_arguments(shlex.split(command)).source == Path("a folder")
