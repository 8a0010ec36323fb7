"""Parity mode's product of every head with its matrix: gradients as einsum's autograd has them.

On a GPU the module takes it by itself; elsewhere it is made to, with the kernel interpreted.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from absorbed_mla import absorb
from absorbed_mla.batch_invariant import batch_invariant_mode
from tests.support import needs
from tests.support.backends import triton_interpreter
from tests.support.cases import INTERPRETED
from tests.support.numerics import check_gradients, random, relative_error
from tests.support.parity import parity_model, tokens_of

# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.invariant.product  # noqa: F401

TOKENS, BATCH, HEADS, NOPE, LATENT, VALUE = 5, 2, 3, 12, 40, 20

# Step -> width of its input, shape of a head's matrix, and the equation.
STEPS = {
    "absorb_query": (NOPE, (NOPE, LATENT), "sbnd,ndc->sbnc"),
    "up_project_value": (LATENT, (VALUE, LATENT), "sbnc,nvc->sbnv"),
}


@pytest.fixture
def own_product(monkeypatch):
    """Both steps through the product of parity mode, whatever the device."""
    monkeypatch.setattr(absorb, "_needs_own_product", lambda x: True)
    with triton_interpreter():
        yield


@pytest.mark.parametrize("step", STEPS)
def test_value_and_gradients(own_product, step):
    """Of all tokens and of all rows of a batch."""
    width, matrix, equation = STEPS[step]
    leaves = [random(TOKENS, BATCH, HEADS, width, seed=1), random(HEADS, *matrix, seed=2)]
    exact = partial(torch.einsum, equation)
    found = check_gradients(getattr(absorb, step), exact, leaves, 1e-5)
    assert "HeadProduct" in str(found.grad_fn), "einsum ran instead"


def parameter_gradients(dtype: torch.dtype, batch_invariant: bool) -> dict[str, Tensor]:
    """Of a model's loss."""
    options = {"form": "absorbed"}
    model = parity_model(dtype, mla=INTERPRETED, batch_invariant=batch_invariant, options=options)
    tokens = tokens_of(2, 16)
    positions = torch.arange(16, device=tokens.device).expand_as(tokens)
    model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@needs.gpu
def test_a_models_gradients_on_a_gpu():
    """Parity mode on and off, in bf16: each is some 2 % off in fp64's eyes, by rounding alone."""
    with batch_invariant_mode():
        found = parameter_gradients(torch.bfloat16, True)
    expected = parameter_gradients(torch.bfloat16, False)
    for name, gradient in expected.items():
        error = relative_error(found[name], gradient)
        assert error < 0.1, f"{name}: {error:.1e}"


@needs.gpu
def test_parity_mode_takes_the_product_on_a_gpu():
    """The tests above look at what runs."""
    x, w = random(TOKENS, BATCH, HEADS, NOPE, seed=1), random(HEADS, NOPE, LATENT, seed=2)
    x.requires_grad_()
    assert "HeadProduct" not in str(absorb.absorb_query(x, w).grad_fn)
    with batch_invariant_mode():
        assert "HeadProduct" in str(absorb.absorb_query(x, w).grad_fn)


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def contiguous(monkeypatch) -> list[Tensor]:
    """What the contiguous product has returned."""
    found, product = [], absorb._contiguous_product

    def recorded(x: Tensor, matrices: Tensor) -> Tensor:
        found.append(product(x.as_subclass(Tensor), matrices))
        return found[-1]

    monkeypatch.setattr(absorb, "_contiguous_product", recorded)
    return found


@pytest.mark.parametrize("tokens", [TOKENS, 0])
@pytest.mark.parametrize("step", STEPS)
def test_generation_writes_tokens_first(step, tokens, contiguous):
    """What inference takes on a GPU outside of parity mode."""
    width, matrix, equation = STEPS[step]
    # A part of wider rows, as q_nope is of the query.
    x = torch.randn(tokens, BATCH, HEADS, width + 3, dtype=torch.float64)[..., :width]
    w = torch.randn(HEADS, *matrix, dtype=torch.float64)
    in_inference, expected = getattr(absorb, f"{step}_in_inference"), torch.einsum(equation, x, w)
    torch.testing.assert_close(in_inference(x, w), expected)
    assert not contiguous, "on a CPU it is the product of training"
    found = in_inference(x.as_subclass(OnGPU), w)
    assert [product is found for product in contiguous] == [True]
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("step", STEPS)
def test_training_does_not_look_whether_gradients_are_on(step, contiguous):
    """What is computed again in the backward must lie in memory as it did, and have its bits."""
    width, matrix, _ = STEPS[step]
    x, w = random(TOKENS, BATCH, HEADS, width, seed=1), random(HEADS, *matrix, seed=2)
    x = x.requires_grad_().as_subclass(OnGPU)
    with torch.no_grad():
        first = getattr(absorb, step)(x, w)
    again = getattr(absorb, step)(x, w)
    assert again.requires_grad and not first.requires_grad
    assert torch.equal(first, again) and first.stride() == again.stride()
    assert not contiguous
