"""Second derivatives raise, however they are asked for; first ones under create_graph are right."""

import pytest
import torch

from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, random_attention
from tests.support.layouts import dense, packed

FORMS = ("absorbed", "expanded")
MESSAGE = "has first derivatives only"
LAYOUTS = {"sbhd": dense(7, 2), "thd": packed((5, 3))}


def layer(form: str, **setup) -> torch.nn.Module:
    return random_attention(TINY, Setup(form=form, core_attention_backend="reference", **setup))


def batch(layout: str = "sbhd"):
    """Input that needs a gradient, and the rest of the call."""
    tokens = LAYOUTS[layout]
    x = tokens.random_rows(TINY.hidden, 1).to(world.device()).requires_grad_()
    return x, tokens.packed_seq_params(world.device())


def gradient(attention, x, packed_params, *, linear: bool = True) -> torch.Tensor:
    """The gradient of a sum of outputs, or of their squares, with its graph."""
    output, _ = attention(x, None, packed_seq_params=packed_params)
    # Of a plain sum the incoming gradient is a constant, which needs no gradient itself.
    [found] = torch.autograd.grad((output if linear else output**2).sum(), x, create_graph=True)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("linear", [True, False])
def test_raises(form, layout, linear):
    """Towards the input, and every weight that acts before the attention's output."""
    attention, (x, params) = layer(form), batch(layout)
    # The gradient of x is linear in the output projection, and autograd follows that.
    weights = [p for n, p in attention.named_parameters() if n != "linear_proj.weight"]
    for towards in (x, *weights):
        found = gradient(attention, x, params, linear=linear)
        with pytest.raises(RuntimeError, match=MESSAGE):
            torch.autograd.grad((found**2).sum(), towards, allow_unused=True)
    found = gradient(attention, x, params, linear=linear)
    with pytest.raises(RuntimeError, match=MESSAGE):
        found.sum().backward()
    output, _ = attention(x, None, packed_seq_params=params)
    weight = attention.linear_k_up_proj.weight
    [found] = torch.autograd.grad(output.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(found.sum(), x)


@pytest.mark.parametrize("form", FORMS)
def test_hessian_vector_product(form):
    attention, (x, _) = layer(form), batch()

    def loss(rows):
        return attention(rows, None)[0].sum()

    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.functional.hvp(loss, x.detach(), torch.ones_like(x))


@pytest.mark.parametrize("form", FORMS)
def test_first_derivatives_keep_their_values(form):
    """Asking for a graph changes no gradient."""
    attention, (x, params) = layer(form), batch()
    with_graph = gradient(attention, x, params, linear=False)
    output, _ = attention(x, None, packed_seq_params=params)
    [plain] = torch.autograd.grad((output**2).sum(), x)
    assert with_graph.requires_grad
    assert torch.equal(with_graph, plain)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recompute", [("mla_up_proj",), ("core_attn",)])
def test_recomputation_refuses_a_graph_of_gradients(form, recompute):
    """Megatron's checkpoints return gradients that depend on nothing."""
    attention, (x, params) = layer(form, recompute=recompute), batch()
    output, _ = attention(x, None, packed_seq_params=params)
    with pytest.raises(RuntimeError, match="create_graph=True does not reach"):
        (output**2).sum().backward(create_graph=True)
    output, _ = attention(x, None, packed_seq_params=params)
    output.sum().backward()
    assert x.grad is not None


def test_head_product_of_parity_mode(monkeypatch):
    """Its kernel is for GPUs; its autograd function is not."""
    from absorbed_mla import absorb
    from absorbed_mla.kernels.invariant import product

    def head_product(x, weight):
        return torch.einsum("tnk,nkc->tnc", x, weight)

    monkeypatch.setattr(product, "head_product", head_product)
    x = torch.randn(3, 2, 4, 5, requires_grad=True)
    weight = torch.randn(4, 5, 6, requires_grad=True)
    found = absorb._HeadProduct.apply(x, weight)
    [grad] = torch.autograd.grad(found.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.autograd.grad(grad.sum(), weight)
