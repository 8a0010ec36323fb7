"""Models with data-parallel attention, with the weights of a model in one process."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import shard_layers, shard_vocabulary
from absorbed_mla.serving.scheduler.cuda_graphs import graph_fields
from absorbed_mla.serving.weights.global_names import global_parameter_names
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.oracle import OracleMLA
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.engine import generating_model
from tests.support.models import gpt_model


@contextlib.contextmanager
def divided_world(experts: int = 1) -> Iterator[None]:
    """All processes divide weights; ``experts`` groups of them have their own experts."""
    with world.parallel(
        tp=1,
        expert_model_parallel_size=experts,
        expert_tensor_parallel_size=world.size() // experts,
    ):
        yield


def divided_model(
    options: AbsorbedMLAOptions | None = None,
    *,
    mla: OracleMLA = TINY,
    dtype: torch.dtype = torch.float32,
    **fields,
) -> GPTModel:
    """Like ``generating_model`` in one process, over the ranks of :func:`divided_world`."""
    # Its graphs would be joined with those of the model that generates.
    plain = {name: value for name, value in fields.items() if name not in graph_fields(None)}
    with world.parallel(tp=1):
        one = generating_model(options, mla=mla, dtype=dtype, **plain)
    whole = dict(one.named_parameters())
    ep = parallel_state.get_expert_model_parallel_world_size()
    sizes = {
        "expert_model_parallel_size": ep if fields.get("num_moe_experts") else 1,
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
    fields = {"num_layers": 2, "cache_mla_latents": True, **fields, **sizes}
    config = config_for(mla, dtype, **fields)
    spec = get_absorbed_mla_decoder_block_spec(config, backend="local", options=options)
    built = gpt_model(mla=mla, dtype=dtype, spec=shard_layers(spec, exchange), **fields)
    model = shard_vocabulary(built, exchange).to(world.device(), dtype).eval()
    _copy(whole, model, exchange)
    return model


@torch.no_grad()
def _copy(whole: Mapping[str, Tensor], model: GPTModel, exchange: TokenExchange) -> None:
    """Set this rank's part of the weights of a whole model."""
    for name, weight in global_parameter_names(model, dict(model.named_parameters())).items():
        rank, size = exchange.rank, exchange.size
        if ".experts." in name:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            size = parallel_state.get_expert_tensor_parallel_world_size()
        weight.copy_(_part(name, whole[name], weight.shape, rank, size))


def _part(name: str, weight: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor:
    if weight.shape == shape:
        return weight
    if "linear_fc1" in name:
        # Gate and up-projection, one below the other.
        return torch.cat([half.chunk(size)[rank] for half in weight.chunk(2)])
    return weight.chunk(size, 1 if "linear_fc2" in name else 0)[rank]
