"""The experts that the tokens of an engine's requests were routed to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import nn

from absorbed_mla.router_replay import decoder_routers, replace_choice
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.experts.router import TopKIndexRouter
from absorbed_mla.serving.token_records import Record, TokenRecords

OPTION = "enable_return_routed_experts"


def records_of(model: GPTModel, context: DynamicInferenceContext) -> TokenRecords:
    """Records of the experts of all layers that have some, in the order that the router has them.

    Args:
        model: Of this rank.
        context: Of its engine.

    Raises:
        ValueError: If the model has no experts, or a router chooses without saying which.
    """
    config = model.config
    if not config.num_moe_experts:
        raise ValueError(f"{OPTION} needs a model with experts (num_moe_experts), got one without")
    routers, width = decoder_routers(model, OPTION), config.moe_router_topk
    dtype, exchange = dtype_of(config.num_moe_experts), exchange_of(model)
    return TokenRecords(model, context, routers, width, dtype, _follow, exchange)


def dtype_of(num_experts: int) -> torch.dtype:
    """Of the numbers of so many experts: a byte, where that is enough."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def bytes_per_token(model: GPTModel) -> int:
    """Bytes that the records of one token take on this rank."""
    if not model.config.num_moe_experts:
        return 0
    width, dtype = model.config.moe_router_topk, dtype_of(model.config.num_moe_experts)
    return len(decoder_routers(model, OPTION)) * width * dtype.itemsize


def _follow(router: nn.Module, record: Record) -> Callable[[], None]:
    if isinstance(router, TopKIndexRouter):
        # Its output are the experts, also those of kernels that choose in one pass.
        return router.register_forward_hook(lambda *call: record(call[-1][1])).remove

    def choose(scores, topk, default):
        values, chosen = default()
        record(chosen)
        return values, chosen

    return replace_choice(router, choose)
