"""Megatron layer specs and decoder-block specs with absorbed MLA, like its ``gpt_layer_specs``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from absorbed_mla.options import AbsorbedMLAOptions
from specs.absorbed_mla_layers import AbsorbedMLATransformerLayer, spec_by_config
from specs.absorbed_mla_parts import LayerParts, moe_layers

# For --spec of programs that take what they import as the spec itself, as gpt_builder does, which
# makes train_rl.py's inference model. Dense and MoE by moe_layer_freq; options are the defaults.
absorbed_mla_layer_spec = spec_by_config(AbsorbedMLATransformerLayer, LayerParts())


@dataclass
class AbsorbedMLABlockSubmodules(TransformerBlockSubmodules):
    """Megatron's spec of a decoder block that knows its parts, also where it has no layers."""

    parts: LayerParts | None = None


def get_absorbed_mla_layer_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
) -> ModuleSpec:
    """Spec of a TransformerLayer with absorbed MLA, dense or MoE by ``moe_layer_freq``.

    A block or model that gets this spec uses it at every depth: where the config has both kinds of
    layers, each chooses its own when it is built. The final norm is Megatron's, which without
    TransformerEngine refuses sequence parallelism; :func:`get_absorbed_mla_decoder_block_spec` has
    one that works.

    Args:
        config: Megatron's MLA config (or the model config that ``--spec`` passes).
        backend: ``"local"`` or ``"transformer_engine"``; None takes TransformerEngine if installed.
        options: Execution options of the attention.

    Raises:
        ValueError: If the backend is unknown or not installed, or the options or
            ``moe_layer_freq`` are not usable.
    """
    _warn_of_standard_mtp(config)
    parts, kinds = LayerParts(backend, options), set(moe_layers(config))
    if len(kinds) > 1:
        return spec_by_config(AbsorbedMLATransformerLayer, parts)
    return parts.layer(config, moe=kinds == {True})


def get_absorbed_mla_decoder_block_spec(
    config: MLATransformerConfig,
    *,
    backend: str | None = None,
    options: AbsorbedMLAOptions | None = None,
    vp_stage: int | None = None,
) -> TransformerBlockSubmodules:
    """Spec of a decoder block: the layers of this pipeline stage and the final norm.

    Args:
        config: Read for ``num_layers``, ``moe_layer_freq`` and the pipeline layout.
        backend: As in :func:`get_absorbed_mla_layer_spec`.
        options: Execution options of the attention.
        vp_stage: Virtual pipeline stage, or None.

    Raises:
        ValueError: If the backend, the options or ``moe_layer_freq`` are not usable.
    """
    _warn_of_standard_mtp(config)
    parts = LayerParts(backend, options)
    by_kind = {False: parts.layer(config, moe=False)}
    if config.num_moe_experts:
        by_kind[True] = parts.layer(config, moe=True)
    layers = [by_kind[is_moe] for is_moe in moe_layers(config)]
    return AbsorbedMLABlockSubmodules(
        layer_specs=[layers[i] for i in _layers_of_this_stage(config, vp_stage)],
        layer_norm=parts.norm,
        parts=parts,
    )


def _warn_of_standard_mtp(config: MLATransformerConfig) -> None:
    """Megatron's own builder, which passes its model config, makes MTP's layers by itself."""
    builder = getattr(config, "builder", "")
    if builder.startswith("megatron.") and getattr(config, "mtp_num_layers", None):
        warnings.warn(
            f"{builder} puts standard MLA into the {config.mtp_num_layers} MTP layer(s); set "
            "builder='specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder' of the model "
            "config for absorbed MLA there, too",
            stacklevel=3,
        )


def _layers_of_this_stage(config: MLATransformerConfig, vp_stage: int | None) -> list[int]:
    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))
