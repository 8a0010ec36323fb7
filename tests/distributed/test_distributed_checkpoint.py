"""Megatron's distributed checkpoints: any tensor-parallel size, and either attention, reads any.

One job sets up tensor parallelism several times, with data parallelism over what is left of the
processes, so that a checkpoint of one size is loaded at the others. Loading moves data only: whole
weights are compared bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from absorbed_mla.checkpoint.distributed import (
    load_model_weights,
    model_sharded_state_dict,
    save_model_weights,
)
from tests.distributed.whole import optimizer_states, whole_tensors
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, VARIANTS
from tests.support.combinations import few_ranks, grid
from tests.support.models import MIXED, gpt_model, logits, with_own_norms
from tests.support.numerics import relative_error
from tests.support.refusal import refusal
from tests.support.standard import KV_UP, interleave_heads

# With 4 processes, what 2 of them do not show.
SIZES = sorted({1 if world.size() <= 2 else 2, world.size()})
DENSE = {"num_layers": 2}
NORMS = {
    "local": ("q_layernorm.weight", "kv_layernorm.weight", "pre_mlp_layernorm.weight"),
    "transformer_engine": (
        "linear_q_up_proj.layer_norm_weight",
        "linear_kv_up_proj.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    ),
}


def model(
    kind: str = "absorbed", layers: dict = MIXED, *, mla: OracleMLA = TINY, seed: int = 0
) -> nn.Module:
    """At the tensor-parallel size of the moment; weights are the same at every size."""
    return with_own_norms(gpt_model(kind, mla, seed=seed, **layers, **world.tp_fields()), seed)


def whole_attention_weights(made: nn.Module) -> dict[str, Tensor]:
    """Every attention weight over all ranks, under the standard's names."""
    named = made.named_parameters()
    whole = whole_tensors((n, p) for n, p in named if ".self_attention." in n or "norm" in n)
    for name in [n for n in whole if n.endswith("linear_k_up_proj.weight")]:
        values = whole.pop(name.replace("_k_", "_v_"))
        combined = interleave_heads(TINY, whole.pop(name), values)
        whole[name.replace("linear_k_up_proj.weight", KV_UP)] = combined
    return {name: tensor.detach().cpu() for name, tensor in whole.items()}


@dataclass(frozen=True)
class Content:
    """What a model holds and computes."""

    weights: dict[str, Tensor]
    logits: Tensor

    @classmethod
    def of(cls, made: nn.Module) -> Content:
        return cls(whole_attention_weights(made), logits(made).cpu())

    def check(self, made: nn.Module) -> None:
        """``made`` holds the same; its logits differ by the order of summation over ranks."""
        weights = whole_attention_weights(made)
        assert set(weights) == set(self.weights)
        for name, weight in self.weights.items():
            assert torch.equal(weights[name], weight), name
        error = relative_error(logits(made).cpu(), self.logits)
        assert error < 1e-5, f"logits differ by {error:.1e}"


at_every_size = pytest.mark.parametrize("size", SIZES, ids="TP{}".format)


def other_sizes(size: int) -> list[int]:
    """Where to load what was saved at ``size``; the same, if there is no other."""
    return [other for other in SIZES if other != size] or [size]


def assert_loaded(expected: Content, folder, size: int, *kinds: str, **model_of) -> None:
    """At other sizes, by models that had other weights."""
    for loaded_at, reader in itertools.product(other_sizes(size), kinds or ("absorbed",)):
        with world.parallel(tp=loaded_at):
            target = model(reader, seed=1, **model_of)
            with pytest.raises(AssertionError):
                expected.check(target)
            load_model_weights(target, folder)
            expected.check(target)


@grid(1, {"size": {f"TP{size}": size for size in SIZES[::-1]}, "kind": ("absorbed", "standard")})
def test_every_size_and_attention_reads_it(kind, size, folder):
    """Save with one, load with both."""
    with world.parallel(tp=size):
        source = model(kind)
        expected = Content.of(source)
        save_model_weights(source, folder)
    assert_loaded(expected, folder, size, "absorbed", "standard")


@few_ranks
@at_every_size
def test_parameters_that_the_standard_lacks(size, folder):
    """A gate, and the norm of k_rope, under the names that they have in the layer."""
    mla = VARIANTS["all_variants"]
    with world.parallel(tp=size):
        source = model(layers=DENSE, mla=mla)
        expected = Content.of(source)
        save_model_weights(source, folder, norm_names="transformer_engine")
    keys = set(dist_checkpointing.load_tensors_metadata(str(folder)))
    for name in ("linear_gate", "k_rope_layernorm"):
        assert f"decoder.layers.1.self_attention.{name}.weight" in keys
    assert_loaded(expected, folder, size, layers=DENSE, mla=mla)


@few_ranks
@pytest.mark.parametrize("names", NORMS)
def test_norms_under_the_names_of_the_reader(names, folder):
    """Megatron's own loading, which knows one set of names, finds what it looks for."""
    source = model("absorbed", DENSE)
    save_model_weights(source, folder, norm_names=names)
    keys = set(dist_checkpointing.load_tensors_metadata(str(folder)))
    other = "local" if names == "transformer_engine" else "transformer_engine"
    for layer in range(2):
        for mine, others in zip(NORMS[names], NORMS[other]):
            assert any(k.endswith(mine) and f"layers.{layer}." in k for k in keys), mine
            assert not any(k.endswith(others) for k in keys), others
    assert not any("linear_k_up_proj" in k or "linear_v_up_proj" in k for k in keys)
    expected = Content.of(source)
    for reader in ("absorbed", "standard"):
        target = model(reader, DENSE, seed=1)
        load_model_weights(target, folder)
        expected.check(target)


@few_ranks
@grid(1, {"size": {f"TP{size}": size for size in SIZES}, "kind": ("absorbed", "standard")})
def test_stacked_layers(kind, size, folder):
    """Models of equal layers may be saved with the layers as an axis of each tensor."""
    with world.parallel(tp=size):
        source = model(kind, DENSE)
        expected = Content.of(source)
        entries = model_sharded_state_dict(source, non_homogeneous_layers=False)
        dist_checkpointing.save(entries, str(folder))
    keys = set(dist_checkpointing.load_tensors_metadata(str(folder)))
    assert f"decoder.layers.self_attention.{KV_UP}" in keys
    assert_loaded(expected, folder, size, layers=DENSE)


@few_ranks
@at_every_size
def test_optimizer_states(size, folder):
    """Megatron's optimizer applies a parameter's entry to its states, under a key of their own."""
    with world.parallel(tp=size):
        dist_checkpointing.save(optimizer_states(model()), str(folder))
    keys = set(dist_checkpointing.load_tensors_metadata(str(folder)))
    assert f"optimizer.state.exp_avg.decoder.layers.0.self_attention.{KV_UP}" in keys
    for loaded_at in other_sizes(size):
        with world.parallel(tp=loaded_at):
            loaded = dist_checkpointing.load(optimizer_states(model(seed=1)), str(folder))
            for name, parameter in model().named_parameters():
                if ".self_attention." in name:
                    assert torch.equal(loaded[name], 3 * parameter.detach() + 1), name


@few_ranks
class TestRefused:
    def test_checkpoint_for_other_dimensions(self, folder):
        """All that is wrong at once, before anything is read into the model."""
        save_model_weights(model("absorbed", DENSE, mla=replace(TINY, kv_lora_rank=20)), folder)
        target = model("absorbed", DENSE, seed=1)
        before = Content.of(target)
        layer = "decoder.layers.1.self_attention."
        parts = (
            f"{layer}linear_kv_down_proj.weight has shape (28, 32), this model needs (32, 32)",
            f"{layer}{KV_UP} has shape (128, 20), this model needs (128, 24)",
            f"{layer}kv_layernorm.weight has shape (20,), this model needs (24,)",
        )
        with refusal(str(folder), *parts):
            load_model_weights(target, folder)
        before.check(target)

    def test_checkpoint_with_fewer_layers(self, folder):
        save_model_weights(model("absorbed", {"num_layers": 1}), folder)
        layer = "decoder.layers.2.self_attention."
        parts = (f"{layer}{KV_UP} is missing, this model needs (128, 24)", f"{layer}linear_q_down")
        with refusal(str(folder), *parts):
            load_model_weights(model(), folder)

    def test_no_checkpoint(self, folder):
        with refusal(str(folder), "not a distributed checkpoint"):
            load_model_weights(model("absorbed", DENSE), folder)

    def test_unknown_norm_names(self, folder):
        with refusal("norm_names", "None, 'local' or 'transformer_engine'", "got 'te'"):
            save_model_weights(model("absorbed", DENSE), folder, norm_names="te")
        assert not list(folder.iterdir())
