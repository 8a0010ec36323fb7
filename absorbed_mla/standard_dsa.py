"""Megatron's own sparse attention, buildable without TransformerEngine.

The converter and tests compare with it. The layers are those of :mod:`absorbed_mla.standard_mla`;
``AbsorbedMLASelfAttention``, ``DSAttention`` and ``DSAIndexer`` are Megatron's, with local linear
layers and plain-PyTorch norms.
"""

from __future__ import annotations

import copy
import dataclasses

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
    AbsorbedMLASelfAttentionSubmodules,
)
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexer,
    DSAIndexerSubmodules,
    DSAttention,
    DSAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.dsa.layer_norm import LayerNorm
from absorbed_mla.linear import DuplicatedLinear
from absorbed_mla.norm import RMSNorm
from absorbed_mla.standard_mla import get_standard_mla_decoder_block_spec


def get_standard_dsa_decoder_block_spec(
    config: MLATransformerConfig, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Block submodules with Megatron's sparse attention, of local layers.

    Args:
        config: With ``experimental_attention_variant="dsa"``; otherwise as for
            :func:`~absorbed_mla.standard_mla.get_standard_mla_decoder_block_spec`.
        vp_stage: Virtual pipeline stage.

    Raises:
        ValueError: If the config is of another attention, or Megatron cannot build it.
    """
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            "experimental_attention_variant must be 'dsa' for Megatron's sparse attention, got "
            f"{config.experimental_attention_variant!r}"
        )
    # Megatron's function for the other parts of a layer refuses the attention.
    dense = copy.copy(config)
    dense.experimental_attention_variant = None
    block = get_standard_mla_decoder_block_spec(dense, backend="local", vp_stage=vp_stage)
    attention = _attention()
    layers = [
        dataclasses.replace(
            layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention)
        )
        for layer in block.layer_specs
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm)


def _attention() -> ModuleSpec:
    indexer = DSAIndexerSubmodules(
        linear_wq_b=DuplicatedLinear,
        linear_wk=DuplicatedLinear,
        k_norm=LayerNorm,
        linear_weights_proj=DuplicatedLinear,
    )
    core = DSAttentionSubmodules(indexer=ModuleSpec(module=DSAIndexer, submodules=indexer))
    return ModuleSpec(
        module=AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=ModuleSpec(module=DSAttention, submodules=core),
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
