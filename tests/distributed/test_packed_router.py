"""The MoE router for packs with padding or shared prefixes, cut over context-parallel ranks.

Balancing must not depend on how much padding a rank has, nor on how many ranks there are: the
expectation is Megatron's own router, given the real tokens of all ranks in one process. With
padding on two ranks, Megatron's router weights the balancing loss wrongly and cannot count tokens.
"""

import contextlib

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from absorbed_mla.packed_router import PackedRouter, counted_tokens, use_packed_router
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec
from specs.absorbed_mla_mtp_specs import get_absorbed_mla_mtp_block_spec
from tests.support import world
from tests.support.auxiliary_losses import forget_auxiliary_losses
from tests.support.cases import TINY, config_for
from tests.support.models import MIXED
from tests.support.refusal import refusal

EXPERTS, TOKENS = 4, 24


def config(**more) -> MLATransformerConfig:
    """With a balancing loss, and the bias that DeepSeek-V3 balances by."""
    fields = {
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1.0,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "calculate_per_token_loss": True,
    }
    return config_for(TINY, torch.float32, **MIXED, **{**fields, **more})


def balancing(
    kind: type[TopKRouter],
    x: Tensor,
    padding: Tensor | None = None,
    counts: Tensor | None = None,
    **more,
) -> tuple[Tensor, Tensor]:
    """Run a router on x [tokens, 1, hidden], with ``counted_tokens`` if ``counts`` are given.

    Returns:
        The gradient of the balancing loss by the router's weight, and the tokens of each expert.
    """
    forget_auxiliary_losses()
    torch.manual_seed(1)
    router = kind(config(**more), get_default_pg_collection()).to(world.device())
    router.set_layer_number(1)
    with contextlib.nullcontext() if counts is None else counted_tokens(router, counts):
        probabilities, _ = router(x, padding)
    (0 * probabilities.sum()).backward()
    return router.weight.grad, router.local_tokens_per_expert


def hidden_states(rank: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens [TOKENS, 1, hidden], and its padding [TOKENS, 1], more on later ranks."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, 1, TINY.hidden, generator=generator)
    padding = torch.arange(TOKENS)[:, None] >= TOKENS - 2 - 5 * rank
    return x.to(world.device()), padding.to(world.device())


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, Tensor]:
    """From the real tokens of all ranks in one process."""
    parts = [hidden_states(rank) for rank in range(world.size())]
    real = torch.cat([x[~padding][:, None] for x, padding in parts])
    with world.parallel():
        gradient, counts = balancing(TopKRouter, real)
    return gradient / len(real), counts


def test_balancing_is_that_of_the_real_tokens(expected):
    x, padding = hidden_states(world.rank())
    with world.parallel(cp=world.size()):
        gradient, counts = balancing(PackedRouter, x, padding)
    # As Megatron finalizes gradients: summed over ranks, divided by all of their real tokens.
    tokens = world.all_reduce((~padding).sum())
    torch.testing.assert_close(world.all_reduce(gradient) / tokens, expected[0])
    torch.testing.assert_close(world.all_reduce(counts), expected[1])


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("balanced", ["aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"])
def test_tokens_count_several_times(balanced, per_token):
    """As if each stood so often in the pack; padding has a count of 0."""
    if balanced == "z_loss":
        if not per_token and world.size() > 1:
            pytest.skip("refused, see test_refused")
        fields = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
    else:
        fields = {"moe_router_load_balancing_type": balanced}
    fields["calculate_per_token_loss"] = per_token
    every = [hidden_states(rank)[0] for rank in range(world.size())]
    # More on some ranks than on others.
    counts = [torch.arange(TOKENS, device=world.device()) % (3 + r) for r in range(world.size())]
    with world.parallel():
        copies = [x.repeat_interleave(n, 0) for x, n in zip(every, counts)]
        gradient, experts = balancing(TopKRouter, torch.cat(copies), **fields)
    if balanced == "global_aux_loss":
        # Of the batches of all data-parallel ranks, which were the same.
        gradient = gradient * world.size()
    with world.parallel(cp=world.size()):
        own = counts[world.rank()]
        found, loads = balancing(PackedRouter, every[world.rank()], counts=own, **fields)
    torch.testing.assert_close(world.all_reduce(found), gradient)
    torch.testing.assert_close(world.all_reduce(loads), experts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=None, got 1.0"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps=None, got 0.1"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "each token alone, got 'sinkhorn'"),
        ({"kind": TopKRouter}, "need PackedRouter with shared prefixes, got TopKRouter"),
    ],
)
def test_refused(fields, message):
    fields = dict(fields)
    kind = fields.pop("kind", PackedRouter)
    if "sinkhorn" in fields.values():
        fields.update(moe_aux_loss_coeff=0.0)
    with refusal(message):
        balancing(kind, hidden_states(0)[0], counts=torch.ones(TOKENS), **fields)


def test_without_padding_it_is_megatrons():
    x, _ = hidden_states(world.rank())
    with world.parallel(cp=world.size()):
        ours, theirs = (balancing(kind, x, None) for kind in (PackedRouter, TopKRouter))
    assert all(map(torch.equal, ours, theirs))


def test_moe_layers_of_a_block_get_it():
    block = get_absorbed_mla_decoder_block_spec(config(), backend="local")
    use_packed_router(block)
    routers = [
        getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
        for layer in block.layer_specs
    ]
    assert [getattr(r, "router", None) for r in routers] == [None, PackedRouter, PackedRouter]


def test_multi_token_prediction_gets_it():
    block = get_absorbed_mla_mtp_block_spec(config(mtp_num_layers=1), backend="local")
    use_packed_router(block)
    [layer] = block.layer_specs
    inner = layer.submodules.mtp_model_layer.submodules
    assert inner.mlp.keywords["submodules"].router is PackedRouter
