"""DeepSeekRouter where ranks divide tokens and experts: what one process gives."""

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.deepseek_router import DeepSeekRouter
from tests.distributed.test_pipeline import check
from tests.support import needs, world
from tests.support.cases import TINY, config_for
from tests.support.experts import ROUTED
from tests.support.pipeline import Model

pytestmark = needs.no_gpu
BALANCED = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
V3 = {"moe_router_group_score_topk": 2, "moe_router_norm_topk_prob": False}
# What Megatron's router does with three experts of two groups.
MEGATRONS = {"moe_router_group_score_topk": 1, "moe_router_norm_topk_prob": True}


def routed(x: Tensor, kind: type[TopKRouter], options: dict, **fields) -> list[Tensor]:
    """Probabilities of x [S, 1, hidden], and the gradient of the router's weight over all ranks."""
    destroy_moe_metrics_tracker()
    divided = world.tp_size() > 1
    sizes = {"tensor_model_parallel_size": world.tp_size(), "sequence_parallel": divided}
    config = config_for(TINY, torch.float32, **ROUTED, **sizes, **fields)
    given = {"options": AbsorbedMLAOptions(**options)} if kind is DeepSeekRouter else {}
    router = kind(config, pg_collection=get_default_pg_collection(), **given)
    router.set_layer_number(1)
    generator = torch.Generator().manual_seed(1)
    router.weight.data.copy_(torch.randn(router.weight.shape, generator=generator))
    router.expert_bias.copy_(torch.linspace(0.3, -0.3, len(router.expert_bias)))
    probs, _ = router(world.own_part(x, 0) if divided else x)
    probs.square().sum().backward()
    gradient = router.weight.grad
    return [probs.detach(), world.all_reduce(gradient) if divided else gradient]


@pytest.fixture
def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 1, TINY.hidden, generator=generator) / 4


@needs.processes(2)
def test_divided_tokens(tokens):
    """Sequence parallelism: each rank routes its own tokens."""
    with world.parallel():
        probs, gradient = routed(tokens, DeepSeekRouter, V3)
    with world.parallel(tp=2):
        own, summed = routed(tokens, DeepSeekRouter, V3)
        assert torch.equal(own, world.own_part(probs, 0))
    torch.testing.assert_close(summed, gradient)


@needs.processes(2)
def test_balancing_of_divided_tokens_is_megatrons(tokens):
    with world.parallel(tp=2):
        ours = routed(tokens, DeepSeekRouter, MEGATRONS, **BALANCED)
        theirs = routed(tokens, TopKRouter, {}, **BALANCED)
    assert all(map(torch.equal, ours, theirs))


@needs.processes(2)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_ranks_of_experts(dispatcher):
    """Each rank has half of the experts, and half of the microbatches."""
    fields = {**ROUTED, **BALANCED, "moe_token_dispatcher_type": dispatcher}
    # The model's own layers.
    del fields["num_layers"], fields["moe_layer_freq"]
    model = Model(experts=True, fields=tuple(fields.items()), options=tuple(V3.items()))
    check(model, expert_model_parallel_size=2)
