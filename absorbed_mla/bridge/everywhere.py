"""Import hook for Megatron-Bridge: every provider that it makes gets absorbed MLA.

For programs that build the provider themselves, such as verl and NeMo-RL: of DeepSeek-V2,
DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash.
"""

from __future__ import annotations

import functools
from typing import Any

from absorbed_mla.bridge.mapping import BRIDGES, register
from absorbed_mla.bridge.spec import OPTIONS, absorbed_mla_layer_spec
from checkpoint_conversion.routing import options_of


def _spec_of(hf_config: Any) -> Any:
    """Our spec, with options where Megatron's router would choose other experts than the model."""
    own = options_of(hf_config.to_dict())
    if not own:
        return absorbed_mla_layer_spec
    return functools.partial(absorbed_mla_layer_spec, options=OPTIONS.replace(**own))


def _with_our_layers(bridge: type) -> type:
    class WithOurLayers(bridge):  # type: ignore[misc, valid-type]
        """The same bridge, whose providers build our attention."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            """See the base class."""
            provider = super().provider_bridge(hf_pretrained)
            provider.transformer_layer_spec = _spec_of(hf_pretrained.config)
            return provider

    WithOurLayers.__name__ = f"{bridge.__name__}WithOurLayers"
    register(WithOurLayers, bridge)
    return WithOurLayers


BRIDGES_WITH_OUR_LAYERS = tuple(map(_with_our_layers, BRIDGES))
