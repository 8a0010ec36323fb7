"""Megatron's own attention with DSA (0.19.2), without TransformerEngine."""

from __future__ import annotations

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from absorbed_mla.dsa.layer_norm import LayerNorm
from absorbed_mla.linear import DuplicatedLinear
from absorbed_mla.norm import RMSNorm


def core_spec() -> ModuleSpec:
    """Of its core attention."""
    linear = DuplicatedLinear
    layers = dsa.DSAIndexerSubmodules(linear, linear, LayerNorm, linear)
    indexer = ModuleSpec(dsa.DSAIndexer, submodules=layers)
    return ModuleSpec(dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer))


def attention(config) -> nn.Module:
    """The layer around it."""
    column = ColumnParallelLinear
    submodules = absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=column,
        linear_q_up_proj=column,
        linear_kv_down_proj=column,
        linear_kv_up_proj=column,
        core_attention=core_spec(),
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    spec = ModuleSpec(
        absorbed_mla.AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=submodules,
    )
    return build_module(spec, config=config, layer_number=1)
