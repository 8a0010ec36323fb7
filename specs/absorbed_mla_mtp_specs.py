"""Specs of multi-token prediction (MTP) whose layers have absorbed MLA, for GPTModel."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec_for_backend
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.packed_roll import require_packed_roll
from specs.absorbed_mla_parts import LayerParts, moe_layers


def get_absorbed_mla_mtp_block_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
    vp_stage: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Spec of the MTP layers of this pipeline stage; None if it has none.

    Their transformer layer is like the model's last, dense or MoE, wherever that one is: a stage
    may hold MTP without any decoder layer (``pipeline_model_parallel_layout="Etttt|mL"``). Norms
    work under sequence parallelism without TransformerEngine, too.

    Args:
        config: Read for ``mtp_num_layers``, ``moe_layer_freq`` and the pipeline layout.
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine if installed.
        options: Execution options of the attention.
        vp_stage: Virtual pipeline stage, or None.

    Raises:
        ValueError: If the backend, the options or ``moe_layer_freq`` are not usable, or this
            Megatron's MTP cannot be corrected for padded packs.
    """
    return mtp_block_of(LayerParts(backend, options), config, vp_stage)


def mtp_block_of(
    parts: LayerParts, config: MLATransformerConfig, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """:func:`get_absorbed_mla_mtp_block_spec` of the parts that a decoder was made of."""
    layer = parts.layer(config, moe=moe_layers(config)[-1], mtp=True)
    block = get_gpt_mtp_block_spec_for_backend(config, layer, parts.provider, vp_stage=vp_stage)
    if block is None:
        return None
    require_packed_roll()
    return MultiTokenPredictionBlockSubmodules([parts.mtp_layer(layer)] * len(block.layer_specs))
