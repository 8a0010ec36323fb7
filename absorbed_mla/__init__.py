"""DeepSeek's multi-head latent attention with matrix absorption, for Megatron-Core.

Data flow of one layer, and where to read it:

    hidden_states -> projections.py -> rope.py -> core_attention/ -> linear_proj
                                                  absorb.py: W_UK into the query, W_UV after it

``attention.py`` puts the stages together, ``specs/absorbed_mla_layer_specs.py`` puts the attention
into Megatron's layers, ``state_dict.py`` and ``sharded_state.py`` speak standard MLA's checkpoints.
"""

from absorbed_mla.attention import AbsorbedMLASelfAttention
from absorbed_mla.dims import MLADims
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.projections import AbsorbedMLASelfAttentionSubmodules
from absorbed_mla.state_dict import to_absorbed_state_dict, to_standard_state_dict

__all__ = [
    "AbsorbedMLAOptions",
    "AbsorbedMLASelfAttention",
    "AbsorbedMLASelfAttentionSubmodules",
    "MLADims",
    "to_absorbed_state_dict",
    "to_standard_state_dict",
]
