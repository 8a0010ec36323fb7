"""What a config.json leaves out is what transformers takes for the model type, or an error."""

import dataclasses
import itertools

import pytest
import torch

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.model import ModelConfig, read_function
from checkpoint_conversion.model_type import convertible
from tests.conversion.support import hugging_face_config, refused

transformers = pytest.importorskip("transformers")
# Defaults that no model can be made of.
_CHANGES = {"deepseek_v2": {"num_experts_per_tok": 6}}
# Counted from the tensors: transformers announces a layer that most checkpoints do not have.
_COUNTED = "num_nextn_predict_layers"


def defaults_of(model_type: str) -> dict:
    """The config.json of transformers' default config."""
    config = getattr(transformers, convertible()[model_type].transformers_config)()
    fields = {**config.to_dict(), "model_type": model_type}
    return fields | _CHANGES.get(model_type, {})


def read(fields: dict) -> tuple:
    """All that the converter takes from a config.json."""
    config = ModelConfig.from_hugging_face(fields)
    function = read_function(config.fields, config)
    return dataclasses.replace(config, hugging_face={}), config.dtype, function


@pytest.mark.parametrize("model_type", convertible())
def test_every_field(model_type):
    """Without any one of them, the model is the same, or an error names the field."""
    fields = defaults_of(model_type)
    expected, without = read(fields), []
    for name in sorted(set(fields) - {"model_type", _COUNTED}):
        try:
            found = read({key: value for key, value in fields.items() if key != name})
        except CheckpointError as error:
            assert f"{name} is missing" in str(error)
        else:
            assert found == expected, f"{model_type} without {name}"
            without.append(name)
    optional = {"routed_scaling_factor", "norm_topk_prob", "tie_word_embeddings"}
    assert optional & set(fields) <= set(without)
    assert not {"num_hidden_layers", "n_routed_experts", "num_experts_per_tok"} & set(without)


def test_scaling_factors_differ():
    """So that the test above compares something."""
    factors = {kind: defaults_of(kind).get("routed_scaling_factor") for kind in convertible()}
    assert factors["deepseek_v3"] == factors["glm_moe_dsa"] == 2.5
    assert factors["glm4_moe_lite"] == 1.8 and factors["deepseek_v2"] == 1.0


_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@pytest.mark.parametrize(
    ("name", "value"),
    [("rope_theta", ...), *itertools.product(_OPTIONAL, [..., 0, None])],
)
def test_rotary_embedding(name, value):
    """Frequencies and scale are those of what was read, as transformers computes them."""
    rope = {
        **hugging_face_config()["rope_scaling"],
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "beta_fast": 20,
        "beta_slow": 2,
        name: value,
    }
    if value is ...:
        del rope[name]
    fields = hugging_face_config(rope_parameters=rope)
    del fields["rope_scaling"], fields["rope_theta"]
    if value == 0 and name.startswith("beta"):
        with refused(f"rope_parameters.{name} must be a number from 1e-06"):
            read(fields)
        return
    try:
        _, _, function = read(fields)
    except CheckpointError as error:
        assert "rope_parameters.mscale " in str(error) and name == "mscale"
        return
    theirs, ours = table(fields, rope), table(fields, vars(function.rotary))
    assert torch.equal(theirs[0], ours[0]) and theirs[1] == ours[1]


def table(fields: dict, rope: dict) -> tuple[torch.Tensor, float]:
    """Transformers' frequencies and their scale; ``rope`` has config.json's names or Megatron's."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = {"rotary_base": "rope_theta", "rotary_scaling_factor": "factor"}
    rope = {names.get(name, name): value for name, value in rope.items()}
    config = transformers.DeepseekV3Config(**{**fields, "rope_parameters": rope})
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
