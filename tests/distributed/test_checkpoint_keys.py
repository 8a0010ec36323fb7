"""A checkpoint's keys and shapes: those of Megatron's own layers, so that each reads the other's.

TransformerEngine's layers take part where they can run.
"""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from absorbed_mla.checkpoint.distributed import (
    _check_complete,
    load_model_weights,
    model_sharded_state_dict,
    save_model_weights,
)
from tests.distributed.test_oracle_grid import backends
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.combinations import few_ranks
from tests.support.models import BLOCK_SPECS, MIXED, gpt_model, logits
from tests.support.numerics import relative_error
from tests.support.refusal import refusal

pytestmark = few_ranks
BACKENDS = pytest.mark.parametrize("backend", backends())


def build(kind: str, backend: str, seed: int = 0):
    """A dense and MoE model of the kind, at the tensor-parallel size of the moment."""
    changes = {
        **world.tp_fields(),
        "transformer_impl": backend,
        "layernorm_epsilon": TINY.norm_eps,
        **MIXED,
    }
    spec = BLOCK_SPECS[kind](config_for(TINY, torch.float32, **changes), backend=backend)
    return gpt_model(kind, TINY, seed=seed, spec=spec, **changes)


def signature(model) -> dict[str, tuple]:
    """Key -> global shape of everything a checkpoint of the model holds."""
    found = {}
    for entry in nested_values(model_sharded_state_dict(model)):
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for part in nested_values(parts) if isinstance(parts, dict) else parts:
            shape = () if isinstance(part, ShardedObject) else tuple(part.global_shape)
            found[part.key] = shape
    return found


@BACKENDS
def test_keys_are_the_standards(backend):
    """One key more or less, and Megatron's strict loading refuses the checkpoint."""
    assert signature(build("absorbed", backend)) == signature(build("standard", backend))


@BACKENDS
def test_megatron_reads_it_strictly(backend, folder):
    """Megatron's own loading into its own model, extra states included."""
    source = build("absorbed", backend)
    save_model_weights(source, folder)
    target = build("standard", backend, seed=1)
    state = dist_checkpointing.load(model_sharded_state_dict(target), str(folder))
    target.load_state_dict({key: state[key] for key in target.state_dict() if key in state})
    assert relative_error(logits(target).cpu(), logits(source).cpu()) < 1e-5


@pytest.mark.parametrize("reader", backends())
@pytest.mark.parametrize("writer", backends())
@pytest.mark.parametrize("kind", ["standard", "absorbed"])
def test_any_layers_read_any_others(kind, writer, reader, folder):
    """Written at TP = world size and read at TP = 1, local layers and TransformerEngine's."""
    source = build(kind, writer)
    expected = logits(source).cpu()
    save_model_weights(source, folder)
    with world.parallel(tp=1):
        target = build("absorbed", reader, seed=1)
        load_model_weights(target, folder)
        assert relative_error(logits(target).cpu(), expected) < 1e-5


def test_a_larger_models_checkpoint_is_refused(folder):
    """Weights that nobody asks for mean that this is not the model that was saved."""
    save_model_weights(build("absorbed", "local"), folder)
    smaller = gpt_model("absorbed", TINY, num_layers=1, **world.tp_fields())
    with refusal("decoder.layers.1.self_attention.linear_proj.weight", "no place in this model"):
        load_model_weights(smaller, folder)
    ignored = ("decoder.layers.1.", "decoder.layers.2.")
    load_model_weights(smaller, folder, ignore=ignored)


def test_all_stages_refuse_what_one_of_them_misses():
    """A stage that raised alone would leave the others waiting in the collective load."""
    model = build("absorbed", "local")
    saved = {key: shape for key, shape in signature(model).items() if shape}
    missing = "decoder.layers.0.self_attention.linear_proj.weight"
    del saved[missing]
    entries = model_sharded_state_dict(model)
    requested = {k: v for k, v in entries.items() if not isinstance(v, ShardedObject)}
    if world.rank():
        requested = {k: v for k, v in requested.items() if ".layers.0." not in k}
    with refusal(f"{missing} is missing"):
        _check_complete(requested, saved, "it", ())


def test_only_the_common_state_of_a_training_checkpoint_is_dropped(folder):
    """Iteration, arguments and optimizer states are no weights; they must not get in the way."""
    source = build("absorbed", "local")
    entries = {**model_sharded_state_dict(source), "iteration": 7, "args": {"lr": 1.0}}
    dist_checkpointing.save(entries, str(folder))
    target = build("absorbed", "local", seed=1)
    load_model_weights(target, folder)
    assert torch.equal(logits(target), logits(source))
