"""Megatron-Bridge with absorbed MLA: a layer spec for its providers, mappings of our weights.

Written for Megatron-Bridge 0.6.2, which nothing else here needs. Importing this registers the
mappings with its bridges of DeepSeek-V2, DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash::

    from absorbed_mla.bridge import absorbed_mla_layer_spec

    provider = AutoBridge.from_hf_pretrained(folder).to_megatron_provider()
    provider.transformer_layer_spec = absorbed_mla_layer_spec

Models with standard MLA are converted as before. Programs that make the provider themselves import
``absorbed_mla.bridge.everywhere`` instead, which gives the spec to every provider of these models.
"""

from absorbed_mla.own_packages import require_own_packages

require_own_packages("checkpoint_conversion", "specs")

from absorbed_mla.bridge import mapping  # noqa: E402
from absorbed_mla.bridge.spec import absorbed_mla_layer_spec  # noqa: E402

__all__ = ["absorbed_mla_layer_spec", "mapping"]
