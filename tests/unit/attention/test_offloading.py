"""Fine-grained activation offloading: the same gradients, and the stages that are sent.

If it fails, backward reads memory that is not back from the host, or nothing is saved.
"""

import pytest
import torch

from absorbed_mla import AbsorbedMLAOptions
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.combinations import grid
from tests.support.dsa import TINY_DSA, dsa_fields
from tests.support.models import call, gpt_model, token_batch
from tests.support.offloading import OffloadingOnACPU

pytestmark = needs.no_gpu

STAGES = ("qkv_linear", "core_attn", "attn_proj")
RECOMPUTE = [(), ("mla_up_proj",), ("core_attn",), ("mla_up_proj", "core_attn")]


@pytest.fixture
def host(monkeypatch) -> OffloadingOnACPU:
    return OffloadingOnACPU(monkeypatch)


def model(form: str, offload=(), recompute=(), **more):
    """Two layers and more, so that some group is not the last of its name, which stays."""
    fields = {"num_layers": 3, **more}
    if offload:
        fields |= {"fine_grained_activation_offloading": True, "offload_modules": list(offload)}
        fields |= {"min_offloaded_tensor_size": 1}
    if recompute:
        fields |= {"recompute_granularity": "selective", "recompute_modules": list(recompute)}
    config = config_for(TINY, torch.float32, **fields)
    gate = "elementwise" if form == "expanded" else None
    options = AbsorbedMLAOptions(form=form, attention_output_gate=gate)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
    return gpt_model(spec=spec, **fields)


def gradients(model, seed: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    call(model, labels=token_batch(seed)).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def require_equal(model, plain, host: OffloadingOnACPU, steps: int = 3, rounding=0.0) -> None:
    """Megatron learns in the first step what it sends in the next ones."""
    for step in range(steps):
        host.begin_step()
        found, expected = gradients(model, step), gradients(plain, step)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=rounding, atol=rounding)


@grid(1, {"kind": ["sparse", "absorbed", "expanded"], "recompute": RECOMPUTE})
def test_gradients(kind, recompute, host):
    """The sparse one's choice of keys, and what its indexer's loss keeps, stay on the device."""
    form, fields = kind, {}
    if kind == "sparse":
        form, fields = "absorbed", {**dsa_fields(TINY_DSA), "dsa_indexer_loss_coeff": 0.5}
    offloading = model(form, (*STAGES, "attn_norm"), recompute, **fields)
    # Three gradients of a gated layer's input are added up in another order.
    rounding = 1e-6 if form == "expanded" else 0.0
    require_equal(offloading, model(form, (), recompute, **fields), host, rounding=rounding)
    expected = {*STAGES, "attn_norm"}
    if recompute == RECOMPUTE[-1]:
        # The inputs, which are all that it saves, are recomputed.
        expected.remove("core_attn")
    assert {name for name, size in host.sent.items() if size} == expected


@pytest.mark.parametrize("stages", [STAGES[:1], STAGES[1:2], STAGES[1:]], ids="+".join)
def test_stages_that_are_named(stages, host):
    require_equal(model("absorbed", stages), model("absorbed"), host)
    assert {name for name, size in host.sent.items() if size} == set(stages)


@pytest.mark.parametrize("in_one_buffer", [False, True])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_weights_stay(form, in_one_buffer, host):
    """Also those that are saved as views, and where DDP keeps all of them in one buffer."""
    offloading = model(form, STAGES)
    if in_one_buffer:
        flat = torch.cat([p.detach().flatten() for p in offloading.parameters()])
        places = flat.split([p.numel() for p in offloading.parameters()])
        for parameter, place in zip(offloading.parameters(), places):
            parameter.data = place.view_as(parameter)
    host.begin_step()
    gradients(offloading, 0)
    weights = {p.untyped_storage().data_ptr() for p in offloading.parameters()}
    assert host.offloaded and not weights & set(host.offloaded)


def test_evaluation_sends_nothing(host):
    offloading = model("absorbed", STAGES)
    host.begin_step()
    with torch.no_grad():
        expected = call(model("absorbed"))
        assert torch.equal(call(offloading), expected)
    assert not host.offloaded


def test_training_after_evaluation(host):
    offloading, plain = model("absorbed", STAGES), model("absorbed")
    require_equal(offloading, plain, host, steps=2)
    host.begin_step()
    with torch.no_grad():
        call(offloading)
    require_equal(offloading, plain, host, steps=2)


def test_a_layer_alone(host):
    """Outside of a GPTModel there is no chunk to offload."""
    attention = model("absorbed", STAGES).decoder.layers[0].self_attention
    hidden = torch.randn(5, 2, TINY.hidden, device=world.device(), requires_grad=True)
    attention(hidden, None)[0].sum().backward()
    assert not host.offloaded and hidden.grad is not None
