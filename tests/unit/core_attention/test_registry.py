"""A backend is one new file: options, the automatic choice and errors follow from the registry."""

from __future__ import annotations

import pytest
import torch

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.registry import ATTENTION_BACKENDS, CP_STRATEGIES, LATENT_CACHES, PAGED_BACKENDS
from tests.support import world
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup, build_attention
from tests.support.layouts import LAYOUTS, grid_layout
from tests.support.numerics import relative_error
from tests.support.refusal import refusal
from tests.unit.core_attention.softmax_backend import ENTRY, SoftmaxBackend


@pytest.fixture
def softmax():
    with ATTENTION_BACKENDS.registered(SoftmaxBackend()) as backend:
        yield backend


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["softmax", "auto"])
def test_trains(softmax, name, layout):
    """Output and every gradient are the oracle's; ``auto`` takes the backend for its rates."""
    setup = Setup(form="auto", core_attention_backend=name)
    execution = execute(TINY, setup, grid_layout(layout, divisible=False))
    exact = execution.oracle(execution.table())
    for tensor, expected in exact.items():
        assert relative_error(execution.tensors[tensor], expected) < 1e-9, tensor
    assert softmax.forwards and softmax.backwards


def test_takes_optimizer_steps(softmax):
    layer = build_attention(TINY, Setup(core_attention_backend="softmax", dtype=torch.float32))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    x = torch.randn(7, 2, TINY.hidden, generator=torch.Generator().manual_seed(0))
    x = x.to(world.device())
    losses = []
    for _ in range(5):
        loss = (layer(x, None)[0] - 1).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)


def test_options_follow(softmax):
    with refusal("core_attention_backend", "softmax", "form='absorbed'", "got form='expanded'"):
        AbsorbedMLAOptions(form="expanded", core_attention_backend="softmax")
    with refusal("core_attention_backend", "auto", "softmax", "'sofmax'"):
        AbsorbedMLAOptions(core_attention_backend="sofmax")


def test_a_name_is_taken_once(softmax):
    with refusal("core_attention_backend", "'softmax'", "already"):
        ATTENTION_BACKENDS.register(ENTRY)


def test_gone_afterwards():
    with ATTENTION_BACKENDS.registered(ENTRY):
        AbsorbedMLAOptions(core_attention_backend="softmax")
    with refusal("core_attention_backend", "'softmax'"):
        AbsorbedMLAOptions(core_attention_backend="softmax")


@pytest.mark.parametrize(
    "registry",
    [ATTENTION_BACKENDS, PAGED_BACKENDS, CP_STRATEGIES, LATENT_CACHES],
    ids=lambda registry: registry.option,
)
def test_every_file_describes_itself(registry):
    """If this fails, the support matrix has a hole."""
    assert registry.names()
    for entry in registry:
        assert entry.name and entry.summary
