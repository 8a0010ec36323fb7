"""A backend is one new file: options, the automatic choice and errors follow from the registry."""

from collections.abc import Mapping

import pytest

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.backends.reference import reference_backward, reference_forward
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput
from absorbed_mla.registry import ATTENTION_BACKENDS, CP_STRATEGIES, LATENT_CACHES, PAGED_BACKENDS
from tests.support.cases import TINY
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, grid_layout
from tests.support.numerics import relative_error
from tests.support.refusal import refusal


class Counting:
    """What CONTRIBUTING.md asks of a new backend: the reference's absorbed form, counted."""

    name = "counting"
    summary = "plain PyTorch that counts its calls"
    forms = ("absorbed",)
    # Faster than anything else, as far as "auto" is told.
    rates: Mapping[str, tuple[float, float]] = {"cpu": (1e6, 1e6), "gpu": (1e6, 1e6)}
    forwards = backwards = 0

    def why_not(self, request: AttentionRequest) -> str | None:
        if request.form != "absorbed":
            return "it attends over the latent (form='absorbed')"
        return "it takes no attention_mask and drops nothing" if request.masked else None

    def forward(self, *arguments) -> AttentionOutput:
        self.forwards += 1
        return reference_forward(*arguments)

    def backward(self, *arguments) -> AttentionInputs:
        self.backwards += 1
        return reference_backward(*arguments)


@pytest.fixture
def counting():
    with ATTENTION_BACKENDS.registered(Counting()) as backend:
        yield backend


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["counting", "auto"])
def test_trains(counting, name, layout):
    """Output and every gradient are the oracle's; ``auto`` takes the backend for its rates."""
    setup = Setup(form="auto", core_attention_backend=name)
    execution = execute(TINY, setup, grid_layout(layout, divisible=False))
    exact = execution.oracle(execution.table())
    for tensor, expected in exact.items():
        assert relative_error(execution.tensors[tensor], expected) < 1e-9, tensor
    assert counting.forwards and counting.backwards


def test_options_and_names_follow(counting):
    with refusal("core_attention_backend", "counting", "form='absorbed'", "got form='expanded'"):
        AbsorbedMLAOptions(form="expanded", core_attention_backend="counting")
    with refusal("core_attention_backend", "auto", "counting", "'countin'"):
        AbsorbedMLAOptions(core_attention_backend="countin")
    with refusal("core_attention_backend", "'counting'", "already"):
        ATTENTION_BACKENDS.register(Counting())


def test_gone_afterwards():
    with ATTENTION_BACKENDS.registered(Counting()):
        AbsorbedMLAOptions(core_attention_backend="counting")
    with refusal("core_attention_backend", "'counting'"):
        AbsorbedMLAOptions(core_attention_backend="counting")


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
