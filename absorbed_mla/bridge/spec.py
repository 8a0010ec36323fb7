"""The decoder block with absorbed MLA, as Megatron-Bridge's providers ask for it."""

from __future__ import annotations

from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.options import AbsorbedMLAOptions
from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

# Bridge writes the spec's name into run_config.yaml, and reads only names that it was told of.
register_allowed_target_prefix("absorbed_mla.bridge.")
# Of the norms inside the attention in Hugging Face's models, whatever rms_norm_eps is.
OPTIONS = AbsorbedMLAOptions(latent_norm_eps=1e-6)


def absorbed_mla_layer_spec(
    config: MLATransformerConfig,
    vp_stage: int | None = None,
    options: AbsorbedMLAOptions = OPTIONS,
) -> TransformerBlockSubmodules:
    """Spec of a decoder block for ``provider.transformer_layer_spec``.

    Args:
        config: The provider.
        vp_stage: Virtual pipeline stage, or None.
        options: Of the attention; others than these with ``functools.partial``.
    """
    return get_absorbed_mla_decoder_block_spec(config, options=options, vp_stage=vp_stage)
