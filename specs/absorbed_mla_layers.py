"""Megatron layers with absorbed MLA that choose their parts from the config they are built with.

A spec of such a layer is complete without a config, so that programs which never call a spec
function (``gpt_builder``, every builder of a HybridModel) take it by ``--spec`` as it is.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from specs.absorbed_mla_parts import LayerParts, moe_layers


class AbsorbedMLATransformerLayer(TransformerLayer):
    """Layer with absorbed MLA and an MLP, dense or a mixture of experts by ``moe_layer_freq``.

    Args:
        config: Megatron's MLA config.
        layer_number: 1-based number in the pipeline stage, or in the model where
            ``add_layer_offset`` is False.
        parts: What it is made of.
        pg_collection: Process groups; None takes Megatron's global ones.
        vp_stage: Virtual pipeline stage, or None.
        is_mtp_layer: Whether it is inside of a layer of multi-token prediction, which is like the
            model's last.
        add_layer_offset: Whether ``layer_number`` counts from the stage's first layer.
        host: The other arguments of Megatron's layer.

    Raises:
        ValueError: If ``moe_layer_freq`` or the config are not usable.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int = 1,
        *,
        parts: LayerParts,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        is_mtp_layer: bool = False,
        add_layer_offset: bool = True,
        **host: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        number = layer_number
        if is_mtp_layer:
            number = config.num_layers
        elif add_layer_offset:
            number += get_transformer_layer_offset(config, vp_stage, get_pg_rank(pg_collection.pp))
        layer = parts.layer(config, moe=moe_layers(config)[number - 1], mtp=is_mtp_layer)
        super().__init__(
            config,
            layer.submodules,
            layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            is_mtp_layer=is_mtp_layer,
            add_layer_offset=add_layer_offset,
            **host,
        )


class AbsorbedMLAAttentionLayer(TransformerLayer):
    """Layer with absorbed MLA and no MLP: Megatron's ``+`` in a ``hybrid_layer_pattern``.

    Args:
        config: Megatron's MLA config.
        layer_number: As of Megatron's layer.
        parts: What it is made of.
        submodules: Not used: the parts are.
        is_mtp_layer: Whether it is inside of a layer of multi-token prediction.
        host: The other arguments of Megatron's layer.

    Raises:
        ValueError: If the config is not usable.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int = 1,
        *,
        parts: LayerParts,
        submodules: TransformerLayerSubmodules | None = None,
        is_mtp_layer: bool = False,
        **host: Any,
    ) -> None:
        attention = TransformerLayerSubmodules(**parts.attention(config, mtp=is_mtp_layer))
        super().__init__(config, attention, layer_number, is_mtp_layer=is_mtp_layer, **host)


def spec_by_config(layer: type, parts: LayerParts) -> ModuleSpec:
    """Spec of one of these layers, for any config."""
    return ModuleSpec(module=layer, params={"parts": parts}, metainfo=parts.metainfo)
