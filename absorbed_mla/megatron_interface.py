"""Methods of the layer that Megatron calls beside forward: checkpoints, QK-clip, gradients."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn

from absorbed_mla.checkpoint.sharded import standard_sharded_state_dict
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.dims import MLADims
from absorbed_mla.fp8 import keep_original_input
from absorbed_mla.qk_clip import SHARDS, check_config, clip_factors, scale_query_and_key


class MegatronInterface(Attention):
    """Base of :class:`~absorbed_mla.attention.AbsorbedMLASelfAttention`, which builds the layers.

    Attributes:
        config: Megatron's.
        dims: Dimensions of the layer on this rank.
        down_layers: Names of the down-projections, and the widths of what each makes.
        core_attention: See ``LatentCoreAttention``.
    """

    config: MLATransformerConfig
    dims: MLADims
    down_layers: dict[str, tuple[int, ...]]
    core_attention: LatentCoreAttention

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Distributed-checkpoint entries, under the names and shapes of Megatron's standard MLA."""
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        return standard_sharded_state_dict(
            own,
            prefix,
            sharded_offsets,
            dims=self.dims,
            tp_rank=self.pg_collection.tp.rank(),
            # Megatron's layers with an indexer have norms of their own, to give it what they make.
            fused_norms=not isinstance(self.linear_proj, RowParallelLinear)
            and self.core_attention.variant is None,
        )

    def get_query_key_value_tensors(self, *args, **kwargs):
        """Not part of this attention: no key or value exists until a form makes them."""
        raise NotImplementedError(
            "AbsorbedMLASelfAttention has no query, key and value tensors; its forward works on "
            "the latent"
        )

    def clip_qk(self) -> None:
        """QK-clip by ``core_attention.current_max_attn_logits``, which it resets.

        Megatron's interface: its ``clip_qk`` (or :func:`absorbed_mla.qk_clip.clip_qk`) has reduced
        the largest scores over data- and context-parallel ranks before.

        Raises:
            ValueError: If ``qk_clip`` is off, there was no training forward since the last call, or
                an adapter adds to what would be scaled.
        """
        check_config(self.config)
        max_logits = self.core_attention.current_max_attn_logits
        if max_logits is None:
            raise ValueError("clip_qk() needs a training forward since the last call, got none")
        weights = self.qk_clip_weights()
        self.core_attention.current_max_attn_logits = None
        gamma = clip_factors(max_logits, self.config.qk_clip_threshold)
        if bool((gamma != 1).any()):
            SHARDS.ask(weights)
            self.scale_qk(gamma)

    def qk_clip_weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        """What QK-clip scales: the weight that makes queries of all heads, and W_UK.

        Raises:
            ValueError: If one of the two layers has more parameters, as with an adapter.
        """
        query = "linear_q_proj" if self.dims.q_lora_rank is None else "linear_q_up_proj"
        return _only_weight(self, query), _only_weight(self, "linear_k_up_proj")

    def scale_qk(self, gamma: Tensor) -> None:
        """Scale query and key weights by gamma [N], a factor of every head's scores."""
        weights = self.qk_clip_weights()
        scale_query_and_key(*weights, self.dims, gamma, self.config.qk_clip_alpha)

    def set_for_recompute_input_layernorm(self) -> None:
        """Megatron's interface for FP8 with a recomputed input norm, whose output is then kept."""
        names = [*self.down_layers, "linear_q_proj", "linear_gate"]
        found = (self._modules.get(name) for name in names)
        keep_original_input(*(layer for layer in found if layer is not None))

    def backward_dw(self) -> None:
        """Compute delayed weight gradients of the layers that were applied as layers."""
        query = "linear_q_proj" if self.dims.q_lora_rank is None else "linear_q_up_proj"
        gate = () if self._modules.get("linear_gate") is None else ("linear_gate",)
        for name in (query, *self.down_layers, *gate, "linear_proj"):
            getattr(self, name).backward_dw()


def _only_weight(attention: nn.Module, name: str) -> nn.Parameter:
    """The weight of a layer that makes its output from nothing else."""
    layer = getattr(attention, name)
    others = sorted({own for own, _ in layer.named_parameters()} - {"weight", "bias"})
    others += [name] if name in attention._modules.get("lora", ()) else []
    if others:
        raise ValueError(
            f"QK-clip scales the weight of {name}, but an adapter makes part of its output "
            f"({type(layer).__name__} has {', '.join(others)}): merge it first, or set "
            "qk_clip=False"
        )
    return layer.weight
