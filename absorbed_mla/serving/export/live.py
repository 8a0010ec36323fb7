"""A live model as a checkpoint of the converter: tensors in memory instead of files."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.distributed import model_sharded_state_dict, sharded_tensors
from absorbed_mla.serving.export.shards import GatheredTensor
from checkpoint_conversion.config_fields import Fields
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats.megatron_folder import MegatronCheckpoint
from checkpoint_conversion.formats.torch_dist import count_mtp_layers, numbered_tensors
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.megatron_args import POST_NORM, check_kind, from_megatron_args
from checkpoint_conversion.model import ModelConfig
from checkpoint_conversion.rotary import LAYER_OPTIONS
from checkpoint_conversion.router_comparison import only_megatrons, refuse_another_function
from checkpoint_conversion.routing import ROUTER_OPTIONS

_NONE = "The model's config describes none that can be exported:"
_ANOTHER_FUNCTION = (
    "hf_config describes another router, or scaling of queries, than the model's: a program that "
    "reads it would compute something else:"
)
# Options of the layers that a model's config.json says and Megatron's config does not.
_OPTIONS = (*ROUTER_OPTIONS, *LAYER_OPTIONS, POST_NORM)
_PREFIX = "config."


class LiveCheckpoint(MegatronCheckpoint):
    """The weights of a model over all its ranks.

    Args:
        weights: Under the names of Megatron's distributed checkpoints.
        config: Of the model.
    """

    format = "absorbed"

    def __init__(self, weights: Mapping[str, GatheredTensor], config: ModelConfig) -> None:
        self.path = self.auxiliary_folder = Path("the live model")
        self.config = dataclasses.replace(config, mtp_layers=count_mtp_layers(weights))
        self.stored = {name: tensor.lazy() for name, tensor in weights.items()}
        self.layout, self.left_alone, self.auxiliary, self.notes = {}, {}, {}, []
        self._weights = weights

    def whole_tensors(self) -> dict[str, LazyTensor]:
        """Split what is stacked; see the base class."""
        return numbered_tensors(self._weights, self.config)


def model_chunks(model: nn.Module | Sequence[nn.Module]) -> list[GPTModel]:
    """This rank's parts of the model, without what training wraps around them.

    Raises:
        ValueError: If one is no GPTModel with this package's attention.
    """
    found = []
    for chunk in [model] if isinstance(model, nn.Module) else model:
        inner = chunk
        while not isinstance(inner, GPTModel) and isinstance(
            getattr(inner, "module", None), nn.Module
        ):
            inner = inner.module
        if not isinstance(inner, GPTModel):
            raise ValueError(
                "model must be a GPTModel of Megatron, perhaps in DDP or Float16Module, or a list "
                f"of a rank's model chunks; got {type(chunk).__name__}"
            )
        _require_own_attention(inner)
        found.append(inner)
    if not found:
        raise ValueError("model must be a GPTModel or a list of them; got an empty list")
    return found


def _require_own_attention(model: GPTModel) -> None:
    for name, layer in model.named_modules():
        if not isinstance(layer, TransformerLayer):
            continue
        attention = layer.self_attention
        if not isinstance(attention, AbsorbedMLASelfAttention):
            raise ValueError(
                f"model must have AbsorbedMLASelfAttention in every layer; {name} has "
                f"{type(attention).__name__}"
            )


def model_config(
    model: GPTModel, hf_config: Mapping[str, object] | None, options: Mapping[str, object]
) -> ModelConfig:
    """The dimensions of a model.

    Args:
        model: Any of its parts.
        hf_config: Its config.json; None: what Megatron's config says, with every row of the
            embedding a token.
        options: Of its layers, of which this part need not have any.

    Raises:
        CheckpointError: Listing what no Hugging Face model has that the converter knows, and where
            a config.json describes another router or scaling of queries.
    """
    args = _arguments(model) | options
    fields = Fields(args, _activation_problems(model.config), _PREFIX)
    check_kind(fields)
    if hf_config is not None:
        fields.raise_problems(_NONE)
        config = ModelConfig.from_hugging_face(hf_config)
        refuse_another_function(config, args, _ANOTHER_FUNCTION)
        return config
    try:
        found = from_megatron_args(args, _PREFIX)
    except CheckpointError as error:
        # It has checked the kind of model, too.
        problems = dict.fromkeys([*fields.problems, *error.problems])
        raise CheckpointError(_NONE, [*problems]) from None
    fields.problems.extend(only_megatrons(found))
    fields.raise_problems(_NONE)
    return found


def _activation_problems(config: TransformerConfig) -> list[str]:
    """What keeps the MLPs from being SwiGLU, which is one argument and two fields of the config."""
    found = [] if config.gated_linear_unit else ["config.gated_linear_unit must be True, got False"]
    if config.activation_func is not F.silu:
        name = getattr(config.activation_func, "__name__", repr(config.activation_func))
        found.append(f"config.activation_func must be torch.nn.functional.silu, got {name}")
    return found


def _arguments(model: GPTModel) -> dict[str, object]:
    """The model as the arguments that a training of it would store."""
    config = model.config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return fields | {
        # Arguments that have another name in the config, or are the model's.
        "num_experts": config.num_moe_experts,
        "swiglu": True,  # see _activation_problems
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
    }


def layer_options(chunks: Sequence[GPTModel]) -> set[tuple[str, object]]:
    """Names and values of the options of this rank's layers; the router's of those with experts."""
    layers = (m for chunk in chunks for m in chunk.modules() if isinstance(m, TransformerLayer))
    return {
        (name, getattr(layer.self_attention.options, name))
        for layer in layers
        for name in _OPTIONS
        if name in LAYER_OPTIONS or isinstance(layer.mlp, BaseMoELayer)
    }


def one_of_each(of_ranks: Sequence[set[tuple[str, object]]]) -> dict[str, object]:
    """The options of a model's layers, from what its ranks have.

    Raises:
        ValueError: If layers differ.
    """
    found = set().union(*of_ranks)
    for option in _OPTIONS:
        values = sorted(str(value) for name, value in found if name == option)
        if len(values) > 1:
            raise ValueError(
                f"all layers that have a {option} must have one to be exported, got "
                f"{', '.join(values)}"
            )
    return dict.fromkeys(_OPTIONS) | dict(found)


def model_shards(chunks: Sequence[GPTModel]) -> list[ShardedTensor]:
    """This rank's shards of the weights, which share the model's memory.

    Raises:
        ValueError: If a weight is no plain tensor.
    """
    states = (sharded_tensors(model_sharded_state_dict(chunk)) for chunk in chunks)
    shards = [*itertools.chain.from_iterable(states)]
    for shard in shards:
        if type(shard.data) not in (Tensor, nn.Parameter) and not is_float8tensor(shard.data):
            raise ValueError(
                f"{shard.key} is a {type(shard.data).__name__}; only weights that are plain "
                "tensors or FP8 parameters can be exported (no FSDP2)"
            )
    return shards
