"""Checkpoints of Megatron's layers with DSA load strictly, and ours are like them."""

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.spec_utils import build_module

from absorbed_mla.checkpoint.state_dict import to_standard_state_dict
from absorbed_mla.dims import MLADims
from tests.support import megatron_dsa, needs, world
from tests.support.dsa import TINY_DSA, config_of, random_weights
from tests.support.dsa_layer import build
from tests.support.harness import Setup
from tests.support.numerics import relative_error

pytestmark = needs.no_gpu  # Megatron puts its rotary tables on a GPU
# More heads than elsewhere: with few, many keys tie at 0, and Megatron's order of ties is another.
DSA = replace(TINY_DSA, heads=16)
# Of Megatron's norms, all have one epsilon.
EPS = {"layernorm_epsilon": 1e-3, "dsa_indexer_k_norm_epsilon": 1e-6}


@pytest.fixture
def theirs():
    torch.manual_seed(3)
    config = config_of(DSA, torch.float32, **EPS)
    made = build_module(megatron_dsa.attention_spec(config), config=config, layer_number=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.rand_like(parameter) - 0.5)
    return made


@pytest.fixture
def ours():
    return build(DSA, Setup(form="auto", dtype=torch.float32), random_weights(DSA), **EPS)


def test_load_and_same_output(theirs, ours, monkeypatch):
    """Strictly; the layer then computes what Megatron's does."""
    megatron_dsa.transform_on_a_cpu(monkeypatch)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(11, 2, DSA.hidden, device=world.device())
    with torch.no_grad():
        expected, _ = theirs(x, None)
        assert relative_error(ours(x, None)[0], expected) < 1e-5


def test_back(theirs, ours):
    config = config_of(DSA, torch.float32)
    written = to_standard_state_dict(ours.state_dict(), MLADims.from_config(config, 1))
    theirs.load_state_dict(written, strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for name, value in theirs.state_dict().items():
        if isinstance(value, torch.Tensor) and "indexer" in name:
            assert torch.equal(value, ours.state_dict()[name]), name


def entries(module) -> dict[str, tuple]:
    """Names of a distributed checkpoint, with whole shapes and who writes."""
    found = {}
    for entry in nested_values(module.sharded_state_dict("a.")):
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        for part in nested_values({"entry": parts}):
            shape = tuple(part.global_shape) if isinstance(part, ShardedTensor) else ()
            found[part.key] = type(part), shape, part.replica_id
    return found


def test_distributed_entries(theirs, ours):
    expected = entries(theirs)
    assert "a.core_attention.indexer.linear_wq_b.weight" in expected
    assert entries(ours) == expected
