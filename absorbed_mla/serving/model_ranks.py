"""Model-parallel ranks of a model that generates, and what they must agree on.

Tensor-parallel ranks and pipeline stages hold one model together: a replica. They schedule the same
requests, and draw the same tokens from the same logits. Replicas have requests of their own; where
they share experts, each of them must run a forward pass whenever one of them does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.checkpoint.hybrid_names import MLA_SYMBOL
from absorbed_mla.inference.decode_context_parallel.support import require_shareable, require_shares
from absorbed_mla.serving.data_parallel_attention.model import exchange_of
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.options import ModelFields
from absorbed_mla.serving.scheduler.block_pool import BLOCK_SIZE, indexers


class Replicas:
    """The replicas that share experts with this rank's; collective over them.

    Attributes:
        several: Whether there is more than one.
    """

    def __init__(self) -> None:
        self._group = parallel_state.get_expert_tensor_and_model_parallel_group()
        ours = parallel_state.get_data_parallel_rank()
        self.several = max_of(ours, self._group) != -max_of(-ours, self._group)

    def any(self, value: bool) -> bool:
        """Whether it is true on any of them."""
        return bool(max_of(int(value), self._group)) if self.several else value


def max_of(value: int, group: dist.ProcessGroup) -> int:
    """The largest of the ranks' values; collective over them."""
    if group.size() == 1:
        return value
    found = torch.tensor(value, device=torch.cuda.current_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return int(found)


def require_layout(model: GPTModel, replicas: Replicas, *, cuda_graphs: bool) -> None:
    """Check that a model can generate in its parallel layout; collective over it.

    Args:
        model: This rank's pipeline stage.
        replicas: Those that share experts with this rank's.
        cuda_graphs: Whether steps are captured.

    Raises:
        ValueError: Naming the option that does not fit, and what it got.
    """
    _require_cached_layers(getattr(model, "hybrid_layer_pattern", None) or "")
    config = model.config
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if virtual > 1:
        raise ValueError(
            "virtual_pipeline_model_parallel_size must be None to generate, got "
            f"{virtual}: requests pass every stage once"
        )
    stage_group = parallel_state.get_pipeline_model_parallel_group()
    if not -max_of(-len(model.decoder.layers), stage_group):
        raise ValueError(
            "pipeline_model_parallel_layout: every stage must have a layer to generate, and one "
            "has none"
        )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    exchanged = exchange_of(model) is not None
    if cuda_graphs and (stages > 1 or replicas.several) and not exchanged:
        raise ValueError(
            "CUDA graphs (num_cuda_graphs, cuda_graphs) need one pipeline stage and experts that "
            f"no data-parallel ranks share, got {stages} stages"
        )
    tp = parallel_state.get_tensor_model_parallel_world_size()
    experts = parallel_state.get_expert_tensor_and_model_parallel_world_size()
    if replicas.several and experts % tp:
        raise ValueError(
            "expert_model_parallel_size x expert_tensor_parallel_size must be a multiple of "
            f"tensor_model_parallel_size {tp} to generate, or divide it; got {experts}"
        )
    if replicas.several and config.moe_token_dispatcher_type == "allgather" and not exchanged:
        raise ValueError(
            "moe_token_dispatcher_type must be 'alltoall' to generate where data-parallel ranks "
            "share experts, got 'allgather', which needs equally many tokens on all of them"
        )


def cache_shares() -> int:
    """Number of ranks that can share a cache."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return tp * parallel_state.get_context_parallel_world_size()


def agree(tokens: Tensor) -> Tensor:
    """What the first of the context-parallel ranks drew; collective over them.

    All of them compute the same logits, but not every GPU kernel adds up in the same order.
    """
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        dist.broadcast(tokens, dist.get_global_rank(group, 0), group=group)
    return tokens


def _require_cached_layers(pattern: str) -> None:
    """Refuse a HybridModel with layers whose state no inference context holds beside latents."""
    others = set(pattern) - {MLA_SYMBOL, *"-E|/"}
    if others:
        raise ValueError(
            f"hybrid_layer_pattern must have {MLA_SYMBOL}, - and E to generate, got {pattern!r}: "
            f"Megatron's contexts hold no state of {', '.join(sorted(others))} beside latents"
        )


def require_shared_cache(model: GPTModel, num_drafts: int) -> None:
    """Check that ranks can share the latents of a model.

    Args:
        model: This rank's pipeline stage.
        num_drafts: The engine's ``num_speculative_tokens``.

    Raises:
        ValueError: Naming the option that does not fit, and what it got.
    """
    require_shares(cache_shares(), BLOCK_SIZE)
    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1 and num_drafts:
        raise ValueError(
            f"num_speculative_tokens must be 0 with context_parallel_size {cp}, got {num_drafts}: "
            "MTP layers draft without a cache, and would cut their tokens over the ranks"
        )
    layers = [one for one in model.modules() if isinstance(one, AbsorbedMLASelfAttention)]
    for layer in layers:
        require_shareable(layer.options, layer.cached_attention.window)
    if indexers(model):
        raise ValueError(
            "decode_context_parallel=True does not go with sparse attention "
            "(experimental_attention_variant='dsa'): a token's chosen keys may all be one rank's"
        )


def require_divided(model: GPTModel, options: EngineOptions) -> None:
    """Check that a model with data-parallel attention can generate with these options.

    Args:
        model: With divided layers, or any other.

    Raises:
        ValueError: Naming the option that does not fit, and what it got.
    """
    if exchange_of(model) is None:
        return
    for name, accepted in options_of(ModelFields)["data_parallel_attention"].needs.items():
        got = getattr(options, name, accepted[0])
        if got not in accepted:
            raise ValueError(
                f"{name} must be {accepted[0]} with data-parallel attention, got {got!r}"
            )
    layers = [one for one in model.modules() if isinstance(one, AbsorbedMLASelfAttention)]
    if any(layer.options.batch_invariant for layer in layers):
        raise ValueError(
            "batch_invariant (parity=True) must be False with data-parallel attention, got True: "
            "sums over ranks are not training's"
        )
