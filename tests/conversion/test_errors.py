"""Which name a wrong one was meant to be."""

from __future__ import annotations

import time

from checkpoint_conversion.errors import KnownNames

NAMES = [
    f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
    for layer in range(30)
    for expert in range(64)
    for part in ("gate", "up", "down")
]


def test_keeps_the_numbers():
    near = KnownNames(NAMES).nearest("model.layers.7.mlp.experts.11.gat_proj.weight")
    assert near == "model.layers.7.mlp.experts.11.gate_proj.weight"


def test_numbers_that_no_name_has():
    near = KnownNames(NAMES).nearest("model.layers.99.mlp.experts.0.up_proj.weight")
    assert near == NAMES[1]


def test_braces_are_no_format():
    assert KnownNames(["a.{x}.weight"]).nearest("a.{x}.weigth") == "a.{x}.weight"


def test_nothing_is_near():
    assert KnownNames(NAMES).nearest("qwertz") is None


def test_a_whole_model_of_wrong_names_takes_no_time():
    """A wrong config makes every name of a large checkpoint unknown."""
    known, start = KnownNames(NAMES), time.process_time()
    for name in NAMES:
        assert known.nearest(name.replace("experts", "expertz")) == name
    assert time.process_time() - start < 5
