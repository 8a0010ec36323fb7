"""Megatron's graphs of whole training iterations: refused in training, unnoticed in generation."""

from __future__ import annotations

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from absorbed_mla import SamplingParams
from tests.support import world
from tests.support.cases import TINY
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.harness import Setup, build_attention
from tests.support.refusal import refusal

GRAPHS = {"cuda_graph_impl": "full_iteration", "cache_mla_latents": True}


def rows() -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(5, 2, TINY.hidden, dtype=torch.float64, generator=make)
    return x.to(world.device())


def test_a_layer_that_generates():
    attention = build_attention(TINY, Setup(), **GRAPHS)
    with torch.no_grad():
        whole, _ = attention(rows(), None)
        cached, _ = attention(rows(), None, inference_context=StaticInferenceContext(2, 8))
    torch.testing.assert_close(cached, whole, rtol=1e-12, atol=1e-12)


def test_an_engine():
    sampling = SamplingParams(max_tokens=4, temperature=0)
    found, expected = (
        engine_of(generating_model(**fields)).generate([prompt(6, 1)], sampling)
        for fields in (GRAPHS, {})
    )
    assert found == expected


def test_a_step_that_trains():
    attention = build_attention(TINY, Setup(), **GRAPHS)
    with refusal("cuda_graph_impl='full_iteration'", "training", "'local'"):
        attention(rows(), None)
    with refusal("cuda_graph_impl='full_iteration'", "cache_mla_latents"):
        build_attention(TINY, Setup(), cuda_graph_impl="full_iteration")
