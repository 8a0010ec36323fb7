"""Outputs that are computed again in backward lie in memory as they did."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from absorbed_mla.core_attention.forms import absorbed
from absorbed_mla.recomputed_outputs import SameLayout
from tests.support.cases import TINY, random_weights
from tests.support.harness import Setup, build_attention, load_weights, run
from tests.support.layouts import dense


def test_of_other_strides():
    function = SameLayout(lambda x: (x, x[:, 1:]))
    x = torch.zeros(3, 4)
    function(x)
    function(x.clone())
    with pytest.raises(AssertionError, match="lie in memory"):
        function(torch.zeros(4, 3).T)


def test_of_another_offset():
    function = SameLayout(lambda x: (x,))
    function(torch.zeros(3))
    with pytest.raises(AssertionError, match="lie in memory"):
        function(torch.zeros(4)[1:])


def test_axes_of_one_element_have_any_stride():
    function = SameLayout(lambda x: (x,))
    function(torch.zeros(3, 1, 4))
    function(torch.zeros(3, 2, 4)[:, :1].clone().as_strided((3, 1, 4), (4, 99, 1)))


def test_a_query_that_lies_otherwise_without_gradients_is_found(monkeypatch):
    """Its numbers would be those of other heads, and gradients wrong."""
    setup = Setup(form="absorbed", recompute=("mla_up_proj",))
    attention = build_attention(TINY, setup)
    load_weights(attention, TINY, setup, random_weights(TINY))
    layout = dense(5, 2)
    rows = (layout.random_rows(TINY.hidden, i) for i in (1, 2))
    call = partial(run, attention, TINY, setup, layout, *rows)
    call()
    absorb_query = absorbed.absorb_query

    def contiguous_without_gradients(q_nope, w_uk):
        found = absorb_query(q_nope, w_uk)
        return found if torch.is_grad_enabled() else found.contiguous()

    monkeypatch.setattr(absorbed, "absorb_query", contiguous_without_gradients)
    with pytest.raises(AssertionError, match="lie in memory"):
        call()
