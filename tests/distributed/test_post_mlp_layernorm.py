"""The norm of experts' output where ranks divide tokens and experts: what one process gives."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.moe_layer import NormedMoE
from absorbed_mla.serving.data_parallel_attention.exchange import TokenExchange
from absorbed_mla.serving.data_parallel_attention.model import shard_layers
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from tests.distributed.test_grouped_experts import layout
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.experts import ROUTED

pytestmark = [needs.no_gpu, needs.processes(2)]


def own_part(name: str, whole: Tensor) -> Tensor:
    """This rank's part of a weight: rows of gates and of ups, columns of what follows them."""
    size, rank = world.size(), world.rank()
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, 1)[rank] if "linear_fc2" in name else whole


def layer(divided: bool = True, change=lambda spec: spec, **fields) -> NormedMoE:
    """With the same random weights whichever ranks divide them."""
    config = config_for(TINY, torch.float64, **{**ROUTED, **fields})
    options = AbsorbedMLAOptions(post_mlp_layernorm=True)
    spec = change(get_absorbed_mla_decoder_block_spec(config, backend="local", options=options))
    build = spec.layer_specs[1].submodules.mlp
    made = build(config=config, pg_collection=get_default_pg_collection()).double()
    made.set_layer_number(1)
    generator = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        shape = list(weight.shape)
        if divided and "linear_fc" in name:
            shape["linear_fc2" in name] *= world.size()
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight.data.copy_(own_part(name, values) if divided else values)
    return made


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the norm's weight in one process."""
    with world.parallel():
        made = layer(divided=False)
        output, _ = made(x)
        output.square().sum().backward()
        return output.detach(), made.post_mlp_layernorm.weight.grad


def test_sequence_parallel():
    """A rank norms its own tokens, and its gradient is marked as one to sum."""
    x = torch.randn(8, 1, TINY.hidden, generator=torch.Generator().manual_seed(0)).double()
    expected, gradient = reference(x)
    with world.parallel(tp=2):
        made = layer(tensor_model_parallel_size=2, sequence_parallel=True)
        output, _ = made(world.own_part(x, 0))
        torch.testing.assert_close(output, world.own_part(expected, 0))
        output.square().sum().backward()
        weight = made.post_mlp_layernorm.weight
        assert weight.sequence_parallel
        torch.testing.assert_close(world.all_reduce(weight.grad), gradient)


def test_data_parallel_attention():
    """Ranks sum up parts of the experts' output first."""
    generator = torch.Generator().manual_seed(world.rank())
    x = torch.randn(3 + world.rank(), 1, TINY.hidden, generator=generator).double()
    expected, _ = reference(x)
    with layout("parts", 1) as fields:
        exchange = TokenExchange(parallel_state.get_expert_tensor_and_model_parallel_group())
        made = layer(change=lambda spec: shard_layers(spec, exchange), **fields).eval()
        exchange.tokens = exchange.counts(len(x))
        with torch.no_grad():
            torch.testing.assert_close(made(x)[0], expected)
