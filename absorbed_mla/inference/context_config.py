"""The config that Megatron's ``DynamicInferenceContext`` is made from."""

from __future__ import annotations

import copy

from megatron.core.transformer.transformer_config import MLATransformerConfig

from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.options import AbsorbedMLAOptions


def context_config(
    config: MLATransformerConfig, options: AbsorbedMLAOptions
) -> MLATransformerConfig:
    """A config of which a context makes its memory, and sizes in bytes, for rows of the cache.

    The context knows numbers of ``params_dtype`` only, of which an FP8 row has room for fewer.
    """
    if options.latent_cache_dtype != Fp8Latents.name:
        return config
    rope = config.qk_pos_emb_head_dim
    row_bytes = Fp8Latents(config.kv_lora_rank, rope).row_bytes
    config = copy.copy(config)
    config.kv_lora_rank = row_bytes // config.params_dtype.itemsize - rope
    return config
