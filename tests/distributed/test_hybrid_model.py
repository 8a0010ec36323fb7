"""HybridModel with absorbed MLA is GPTModel under other names: losses, gradients, checkpoints."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from torch import nn

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.distributed import (
    load_model_weights,
    model_sharded_state_dict,
    save_model_weights,
)
from absorbed_mla.checkpoint.hybrid_names import MLA_SYMBOL, to_gpt_name, to_gpt_state_dict
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.combinations import few_ranks, grid
from tests.support.hybrid import hybrid_model, hybrid_twin
from tests.support.models import MIXED, call, gpt_model, token_batch, with_own_norms
from tests.support.refusal import refusal

pytestmark = few_ranks

# Pattern of the HybridModel -> config of the GPTModel with the same weights.
TWINS = {
    "+-+-": {"num_layers": 2},
    "+-+E+E": MIXED,
    "+-/+-": {"num_layers": 1, "mtp_num_layers": 1},
    "+-+E+E/+E/+E": {**MIXED, "mtp_num_layers": 2},
}
EVERY_TWIN = pytest.mark.parametrize("pattern", TWINS)


def fields(pattern: str) -> dict:
    """Of the config; Megatron trains mixtures of experts under TP with SP only."""
    return {**TWINS[pattern], **world.tp_fields()}


def gpt(pattern: str, seed: int = 0) -> nn.Module:
    """The GPTModel of the same weights, its norms included, which are ones at first."""
    mtp = None
    if "/" in pattern:
        config = config_for(TINY, torch.float32, **fields(pattern))
        mtp = get_absorbed_mla_mtp_block_spec(config, backend="local")
    return with_own_norms(gpt_model(seed=seed, mtp_block_spec=mtp, **fields(pattern)), seed)


def hybrid(pattern: str, seed: int = 0) -> nn.Module:
    return with_own_norms(hybrid_model(pattern, seed=seed, **fields(pattern)), seed)


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under GPTModel's names."""
    is_gpt = isinstance(model, GPTModel)
    return {
        name if is_gpt else to_gpt_name(name, state_dict=True): parameter
        for name, parameter in model.named_parameters()
    }


def check_same_weights(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = named(found), named(expected)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


@EVERY_TWIN
def test_losses_and_gradients_are_gpt_models(pattern):
    """Same weights, same operations in the same order: equal bit by bit."""
    expected = gpt(pattern)
    found = hybrid_twin(expected, pattern, **fields(pattern))
    attentions = [m for m in found.modules() if isinstance(m, AbsorbedMLASelfAttention)]
    assert len(attentions) == pattern.count("+")
    losses = [call(model, labels=token_batch(6)) for model in (expected, found)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.mean().backward()
    ours, theirs = named(found), named(expected)
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert parameter.grad is not None and parameter.grad.any(), name
        assert torch.equal(ours[name].grad, parameter.grad), name


@EVERY_TWIN
def test_state_dicts_there_and_back(pattern):
    source = gpt(pattern)
    state = hybrid_twin(source, pattern, **fields(pattern)).state_dict()
    assert state.keys() != source.state_dict().keys()
    target = gpt(pattern, seed=2)
    target.load_state_dict(to_gpt_state_dict(state))
    check_same_weights(target, source)


# Dense layers, and the model that has everything.
both_ways = grid(
    1,
    {"pattern": ["+-+-", "+-+E+E/+E/+E"], "ways": {"gpt": (gpt, hybrid), "hybrid": (hybrid, gpt)}},
)


@both_ways
def test_distributed_checkpoints(ways, pattern, folder):
    """Each reads what the other wrote, at another tensor-parallel size too."""
    write, read = ways
    source = write(pattern)
    save_model_weights(source, folder)
    target = read(pattern, seed=1)
    load_model_weights(target, folder)
    check_same_weights(target, source)
    losses = call(source, labels=token_batch(6))
    with world.parallel(tp=1):
        target = read(pattern, seed=1)
        load_model_weights(target, folder)
        torch.testing.assert_close(call(target, labels=token_batch(6)), losses)


@both_ways
def test_names_for_megatrons_own_loading(ways, pattern, folder):
    """It knows its own names only, and compares every one of them, extra states included."""
    write, read = ways
    source = write(pattern)
    save_model_weights(source, folder, layer_names="gpt" if read is gpt else "hybrid")
    target = read(pattern, seed=1)
    asked = model_sharded_state_dict(target)
    state = dist_checkpointing.load(asked, str(folder), strict=StrictHandling.RAISE_ALL)
    target.load_state_dict({key: state[key] for key in target.state_dict() if key in state})
    check_same_weights(target, source)


@pytest.mark.parametrize("pattern", ["+-+-"])
def test_stacked_layers_of_gpt_models(pattern, folder):
    """Whose layers are an axis of each tensor."""
    source = gpt(pattern)
    entries = model_sharded_state_dict(source, non_homogeneous_layers=False)
    dist_checkpointing.save(entries, str(folder))
    keys = set(dist_checkpointing.load_tensors_metadata(str(folder)))
    assert "decoder.layers.mlp.linear_fc2.weight" in keys
    target = hybrid(pattern, seed=1)
    load_model_weights(target, folder)
    check_same_weights(target, source)


class TestRefused:
    @pytest.mark.parametrize("pattern", ["++--", "-+", "+-+", "+-/+"])
    def test_a_pattern_that_no_gpt_model_has(self, pattern, folder):
        size = {"tensor_model_parallel_size": world.tp_size()}
        model = hybrid_model(pattern, **size)
        shown = pattern.replace("+", MLA_SYMBOL)
        alternate = f"alternate MLA ({MLA_SYMBOL}) and MLP (- or E)"
        with refusal(f"hybrid_layer_pattern={shown!r}", alternate):
            save_model_weights(model, folder, layer_names="gpt")
        assert not list(folder.iterdir())
        with refusal("layers", "do not alternate"):
            to_gpt_state_dict(model.state_dict())

    def test_unknown_layer_names(self, folder):
        with refusal("layer_names", "None, 'gpt' or 'hybrid'", "got 'mamba'"):
            save_model_weights(hybrid("+-+-"), folder, layer_names="mamba")

    def test_another_number_of_layers(self, folder):
        save_model_weights(gpt("+-+-"), folder)
        target = hybrid_model("+-", **fields("+-+-"))
        with refusal("decoder.layers.1.self_attention.linear_proj.weight", "no place"):
            load_model_weights(target, folder)
