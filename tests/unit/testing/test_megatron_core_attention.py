"""Megatron's DSAttention in our core slot: the oracle's output and gradients, as ours has them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.testing.megatron_core_attention import (
    MegatronCoreAttention,
    MegatronCoreAttentionSubmodules,
)
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec
from tests.oracle_dsa import OracleLoss
from tests.support import megatron_dsa, needs
from tests.support.dsa import TINY_DSA, config_of, random_weights
from tests.support.dsa_layer import build, evaluate, loss_fields
from tests.support.harness import Setup
from tests.support.layouts import grid_layout
from tests.support.numerics import relative_error
from tests.support.refusal import refusal

pytestmark = needs.no_gpu  # Megatron puts its rotary tables on a GPU
# With few heads of the indexer many keys tie at 0, and Megatron's order of ties is another.
DSA = dataclasses.replace(TINY_DSA, heads=16)
SETUP = Setup(form="auto", dtype=torch.float32)
LOSS = OracleLoss(coefficient=0.7)


def with_theirs():
    config = config_of(DSA, torch.float32, **loss_fields(LOSS))
    options = AbsorbedMLAOptions(latent_norm_eps=DSA.mla.norm_eps)
    spec = get_absorbed_mla_layer_spec(config, backend="local", options=options)
    spec = spec.submodules.self_attention
    theirs = megatron_dsa.attention_spec(config).submodules.core_attention
    core = ModuleSpec(MegatronCoreAttention, submodules=MegatronCoreAttentionSubmodules(theirs))
    submodules = dataclasses.replace(spec.submodules, core_attention=core)
    spec = dataclasses.replace(spec, submodules=submodules)
    return build_module(spec, config=config, layer_number=1)


@pytest.mark.parametrize("recompute", [(), ("mla_up_proj", "core_attn")], ids=["", "recompute"])
def test_equal(monkeypatch, recompute):
    """Output and every gradient; their parameters have one more level in their names."""
    megatron_dsa.transform_on_a_cpu(monkeypatch)
    layout = grid_layout("sbhd", False)
    ours = build(DSA, SETUP, random_weights(DSA), LOSS)
    expected = evaluate(ours, DSA, SETUP, layout)
    theirs = with_theirs()
    theirs.checkpoint_core_attention = "core_attn" in recompute
    theirs.recompute_up_proj = "mla_up_proj" in recompute
    for name, parameter in ours.named_parameters():
        their_name = name.replace("core_attention.", "core_attention.attention.")
        with torch.no_grad():
            theirs.get_parameter(their_name).copy_(parameter)
    x, grad = (layout.random_rows(DSA.hidden, seed=seed).float() for seed in (1, 2))
    x.requires_grad_()
    output, _ = theirs(x, None)
    output.backward(grad)
    assert relative_error(output.flatten(0, 1), expected.output) < 1e-5
    assert relative_error(x.grad.flatten(0, 1), expected.input_grad) < 1e-5
    for name, parameter in ours.named_parameters():
        their_name = name.replace("core_attention.", "core_attention.attention.")
        assert relative_error(theirs.get_parameter(their_name).grad, parameter.grad) < 1e-5, name


def test_packs_are_refused():
    layout = grid_layout("thd", False)
    x = layout.random_rows(DSA.hidden, seed=1).float()
    with refusal("MegatronCoreAttention takes dense batches"):
        with_theirs()(x, None, packed_seq_params=layout.packed_seq_params(x.device))
