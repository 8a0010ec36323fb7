"""What an engine returns of its layers' choices for tokens: experts, and keys of sparse attention.

By the name of the field of a result; ``enable_return_`` and the name is the option that asks for
it, the name and ``_prompt_start`` a sampling parameter.
"""

from __future__ import annotations

from typing import Any

from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.models.gpt import GPTModel

from absorbed_mla.serving import indexer_topk, routed_experts
from absorbed_mla.serving.token_records import TokenRecords

_KINDS = {"routed_experts": routed_experts, "indexer_topk": indexer_topk}


def asked_choices(options: Any) -> list[str]:
    """Names of what options of an engine or of ``LLM`` ask for."""
    return [name for name in _KINDS if getattr(options, f"enable_return_{name}")]


def records_of_choices(
    model: GPTModel, context: DynamicInferenceContext, options: Any
) -> dict[str, TokenRecords]:
    """By name, the records that options ask for.

    Raises:
        ValueError: If the model makes no such choices.
    """
    return {name: _KINDS[name].records_of(model, context) for name in asked_choices(options)}


def bytes_per_token(model: GPTModel, options: Any) -> int:
    """Bytes that the records of one token take on this rank."""
    return sum(_KINDS[name].bytes_per_token(model) for name in asked_choices(options))
