"""DeepSeek's multi-head latent attention with matrix absorption, for Megatron-Core.

Data flow of one layer, and where to read it:

    hidden_states -> projections.py -> rope.py -> core_attention/ -> linear_proj
                                                  absorb.py: W_UK into the query, W_UV after it

``attention.py`` puts the stages together, ``specs/absorbed_mla_layer_specs.py`` puts the attention
into Megatron's layers, ``state_dict.py`` and ``sharded_state.py`` speak standard MLA's checkpoints.

A public name is imported when it is asked for: options, which command lines show, need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from absorbed_mla.attention import AbsorbedMLASelfAttention
    from absorbed_mla.checkpoint.state_dict import to_absorbed_state_dict, to_standard_state_dict
    from absorbed_mla.dims import MLADims
    from absorbed_mla.options import AbsorbedMLAOptions
    from absorbed_mla.projections import AbsorbedMLASelfAttentionSubmodules

__all__ = [
    "AbsorbedMLAOptions",
    "AbsorbedMLASelfAttention",
    "AbsorbedMLASelfAttentionSubmodules",
    "MLADims",
    "to_absorbed_state_dict",
    "to_standard_state_dict",
]
_MODULES = {
    "AbsorbedMLAOptions": "options",
    "AbsorbedMLASelfAttention": "attention",
    "AbsorbedMLASelfAttentionSubmodules": "projections",
    "MLADims": "dims",
    "to_absorbed_state_dict": "checkpoint.state_dict",
    "to_standard_state_dict": "checkpoint.state_dict",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
