"""Forward hooks: tensors that they return or keep are not changed by the layer."""

import pytest
import torch
from megatron.core.inference.contexts import StaticInferenceContext
from torch import nn

from absorbed_mla.lora.adapter import AttentionLoRA
from tests.support import world
from tests.support.cases import TINY
from tests.support.harness import Setup, random_attention
from tests.support.layouts import dense

FORMS = ("absorbed", "expanded")
TOKENS = dense(9, 2)


def layer(form: str) -> nn.Module:
    return random_attention(TINY, Setup(form=form))


def rows() -> torch.Tensor:
    return TOKENS.random_rows(TINY.hidden, 1).to(world.device())


def patch_by_hook(attention, kept):
    attention.linear_q_up_proj.register_forward_hook(lambda *_: (kept, None))


def patch_by_global_hook(attention, kept):
    def hook(module, inputs, output):
        return (kept, None) if module is attention.linear_q_up_proj else None

    return torch.nn.modules.module.register_module_forward_hook(hook)


def patch_by_forward(attention, kept):
    attention.linear_q_up_proj.forward = lambda x: (kept, None)


def patch_by_layer(attention, kept):
    patched = nn.Module()
    patched.forward = lambda x: (kept, None)
    attention.linear_q_up_proj = patched


PATCHES = [patch_by_hook, patch_by_global_hook, patch_by_forward, patch_by_layer]


def query_of(attention, x) -> torch.Tensor:
    q_down, _ = attention._down_project(x)
    return attention._query(attention._query_latent(q_down)).detach().clone()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("way", ["train", "no_grad", "infer"])
def test_activation_patching(form, patch, way):
    """The tensor put in place of the query is the same before and after, and so are two runs."""
    attention, x = layer(form), rows()
    kept = query_of(attention, rows() * 2)
    given = kept.clone()
    handle = patch(attention, kept)
    try:
        found = [forward(attention, x, way) for _ in range(2)]
    finally:
        if handle is not None:
            handle.remove()
    assert torch.equal(kept, given)
    assert torch.equal(*found)


def forward(attention, x, way: str) -> torch.Tensor:
    if way == "train":
        return attention(x.clone().requires_grad_(), None)[0].detach()
    with torch.no_grad():
        context = StaticInferenceContext(2, 16) if way == "infer" else None
        return attention(x, None, inference_context=context)[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_hook_may_keep_what_it_is_shown(form):
    attention, x = layer(form), rows()
    expected = query_of(attention, x)
    shown = []
    attention.linear_q_up_proj.register_forward_hook(lambda *args: shown.append(args[2][0]))
    attention(x, None)
    assert torch.equal(shown[0], expected)


def test_without_hooks_the_query_is_rotated_in_place(monkeypatch):
    """A copy is as large as the query: 400 MB for 8k tokens of DeepSeek-V3."""
    attention, made = layer("expanded"), []
    plain = type(attention.linear_q_up_proj).forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        made.append(output[0])
        return output

    monkeypatch.setattr(type(attention.linear_q_up_proj), "forward", forward)
    expected = query_of(attention, rows())
    made.clear()
    attention(rows(), None)
    [query] = [x for x in made if x.shape == expected.shape]
    assert not torch.equal(query, expected), "rotated where it lies"


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_lora_takes_the_input_that_a_pre_hook_gives(grad):
    attention = layer("absorbed")
    lora = AttentionLoRA(attention, {"linear_proj": (4, 1.0)})
    nn.init.normal_(lora["linear_proj"].lora_B.weight)
    weight = attention.linear_proj.weight
    x = torch.randn_like(weight)[:, None]
    with torch.set_grad_enabled(grad):
        expected, _ = attention.linear_proj(2 * x)
        attention.linear_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        found, _ = attention.linear_proj(x)
    assert torch.equal(found, expected)
