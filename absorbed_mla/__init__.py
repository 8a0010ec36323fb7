"""DeepSeek's multi-head latent attention with matrix absorption, for Megatron-Core.

The stages of one layer, and where each is:

    hidden_states          attention.py puts the stages together
    -> projections         linear.py, norm.py (built in attention.py)
    -> absorb              absorb.py: W_UK into the query
    -> rope                rope.py
    -> [context parallel]  context_parallel/: ranks exchange latents
    -> core attention      core_attention/: forms, masks, backends; kernels/
    -> V up-projection     absorb.py: W_UV
    -> linear_proj

``naive.py`` has the same equations straight from the paper. ``inference/`` is the attention over
cached latents, ``serving/`` makes text with Megatron's engine, ``checkpoint/`` reads and writes
standard MLA's state dicts and checkpoints, ``specs/absorbed_mla_layer_specs.py`` puts the attention
into Megatron's layers.

Public names are imported on first use, so that command lines can show options without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from absorbed_mla.attention import AbsorbedMLASelfAttention
    from absorbed_mla.checkpoint.state_dict import to_absorbed_state_dict, to_standard_state_dict
    from absorbed_mla.dims import MLADims
    from absorbed_mla.options import AbsorbedMLAOptions
    from absorbed_mla.prefix_tree import PrefixTree
    from absorbed_mla.projections import AbsorbedMLASelfAttentionSubmodules
    from absorbed_mla.serving.async_llm import AsyncLLM
    from absorbed_mla.serving.beam_search import BeamSearchParams
    from absorbed_mla.serving.llm import LLM
    from absorbed_mla.serving.sampling.parameters import SamplingParams
    from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams

__version__ = "0.1.0"  # and in checkpoint_conversion
__all__ = [
    "LLM",
    "AbsorbedMLAOptions",
    "AbsorbedMLASelfAttention",
    "AbsorbedMLASelfAttentionSubmodules",
    "AsyncLLM",
    "BeamSearchParams",
    "MLADims",
    "PrefixTree",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "to_absorbed_state_dict",
    "to_standard_state_dict",
]
_MODULES = {
    "LLM": "serving.llm",
    "AbsorbedMLAOptions": "options",
    "AbsorbedMLASelfAttention": "attention",
    "AbsorbedMLASelfAttentionSubmodules": "projections",
    "AsyncLLM": "serving.async_llm",
    "BeamSearchParams": "serving.beam_search",
    "MLADims": "dims",
    "PrefixTree": "prefix_tree",
    "SamplingParams": "serving.sampling.parameters",
    "StructuredOutputsParams": "serving.structured_output.parameters",
    "to_absorbed_state_dict": "checkpoint.state_dict",
    "to_standard_state_dict": "checkpoint.state_dict",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise
        raise ImportError(
            f"{__name__}.{name} needs megatron-core: pip install 'megatron-core>=0.19.0,<0.21', on "
            "Python 3.11 with --no-deps --ignore-requires-python"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
