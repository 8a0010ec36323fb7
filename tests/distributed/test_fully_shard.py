"""PyTorch's ``fully_shard`` (FSDP2) of the attention, of its children, of those that refuse it."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from absorbed_mla.qk_clip import clip_qk
from tests.support import needs, world
from tests.support.cases import TINY, random_weights
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.layouts import dense
from tests.support.numerics import relative_error
from tests.support.refusal import refusal

pytestmark = needs.processes(2)
form = pytest.mark.parametrize("form", ["absorbed", "expanded"])
# Below the largest scores of some heads.
CLIP = {"qk_clip": True, "qk_clip_threshold": 4.0}


@pytest.fixture(autouse=True)
def _data_parallel():
    with world.parallel():
        yield


def layer(form: str, **config):
    setup = Setup(form=form)
    attention = build_attention(TINY, setup, **config)
    load_weights(attention, TINY, setup, random_weights(TINY))
    return attention


def gradients(attention) -> dict[str, torch.Tensor]:
    """Of the input and every parameter; all ranks have the same input."""
    x = dense(7, 2).random_rows(TINY.hidden, 1).to(world.device()).requires_grad_()
    output, _ = attention(x, None)
    output.square().sum().backward()
    found = {"input": x.grad}
    for name, parameter in attention.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def sharded(attention, child: str):
    mesh = init_device_mesh(world.device().type, (world.size(),))
    fully_shard(attention.get_submodule(child), mesh=mesh)
    return attention


@form
@pytest.mark.parametrize("child", ["", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj"])
def test_gradients(form, child):
    expected = gradients(layer(form))
    found = gradients(sharded(layer(form), child))
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) < 1e-12, name


@form
@pytest.mark.parametrize("sharding", [True, False], ids=["zero-3", "zero-2"])
def test_training(form, sharding):
    """Five steps of AdamW; every rank has a batch of its own, the plain layer those of all."""
    layout = dense(6, 2)
    batches = [
        [layout.random_rows(TINY.hidden, 10 * step + rank) for rank in range(world.size())]
        for step in range(5)
    ]
    plain, shards = layer(form), layer(form)
    mesh = init_device_mesh(world.device().type, (world.size(),))
    fully_shard(shards, mesh=mesh, reshard_after_forward=sharding)
    of_plain, of_shards = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, shards))
    for batch in batches:
        expected = [_loss(plain, x) for x in batch]
        (sum(expected) / len(batch)).backward()
        loss = _loss(shards, batch[world.rank()])
        loss.backward()
        assert loss.item() == pytest.approx(expected[world.rank()].item(), rel=1e-12)
        for optimizer in (of_plain, of_shards):
            optimizer.step()
            optimizer.zero_grad()
    for (name, weight), whole in zip(shards.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(weight.full_tensor(), whole) < 1e-12, name


def _loss(attention, x: torch.Tensor) -> torch.Tensor:
    output, _ = attention(x.to(world.device()), None)
    return output.square().mean()


@pytest.mark.parametrize("child", ["linear_k_up_proj", "linear_v_up_proj"])
def test_a_weight_that_is_handed_out(child):
    """FSDP frees it after the call, before the attention has used it."""
    attention = sharded(layer("absorbed"), child)
    with refusal("fully_shard", "HeadwiseUpProjection", "AbsorbedMLASelfAttention"):
        gradients(attention)


@pytest.mark.parametrize("child", ["", "linear_q_up_proj"])
def test_qk_clip(child):
    """Rows of heads that lie on different ranks."""
    clipped = []
    for attention in (layer("absorbed", **CLIP), sharded(layer("absorbed", **CLIP), child)):
        gradients(attention)
        before = attention.core_attention.current_max_attn_logits.clone()
        clip_qk(attention)
        weights = attention.linear_q_up_proj.weight, attention.linear_k_up_proj.weight
        whole = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
        clipped.append([before, *(w.detach() for w in whole)])
    assert all(map(torch.equal, *clipped))
    assert not torch.equal(clipped[0][2], layer("absorbed").linear_k_up_proj.weight)
