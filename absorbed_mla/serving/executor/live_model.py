"""What ``LLM.from_model`` makes of a live model: a runner, after checks that it can generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absorbed_mla.serving.executor.cache_size import engine_options
from absorbed_mla.serving.executor.local import LocalRunner
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.model_ranks import Replicas, require_layout, require_shared_cache
from absorbed_mla.serving.option_schema import options_of
from absorbed_mla.serving.options import ModelFields
from absorbed_mla.serving.scheduler import cuda_graphs
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer, open_tokenizer


def runner_of(
    model: Any, tokenizer: str | Path | Any | None, options: dict[str, Any]
) -> tuple[LocalRunner, Tokenizer | None]:
    """A runner of this rank's model, asleep, and its tokenizer.

    Args:
        model: As of ``LLM.from_model``, like the other two.
        tokenizer: None: there is none.
        options: By name.

    Raises:
        ValueError: If the model cannot generate, or an option is not for it.
    """
    built = sorted(set(options_of(ModelFields)) & set(options))
    if built:
        raise ValueError(f"from_model has no option {', '.join(built)}: the model has it already")
    given = LLMOptions.of(options)
    model = _without_wrappers(model)
    _require_generating(model, given)
    found = open_tokenizer(tokenizer, None, trust_remote_code=given.trust_remote_code)
    longest = max(model.max_sequence_length, given.max_model_len or 0)
    vocab_size = model.vocab_size
    if found is not None:
        vocab_size = min(vocab_size, found.vocab_size)
    sizes = engine_options(model, given, longest, vocab_size)
    return LocalRunner(model, sizes), found


def _without_wrappers(model: Any) -> Any:
    if isinstance(model, list | tuple):
        raise ValueError(
            f"model must be one GPTModel, got a {type(model).__name__} of {len(model)}: "
            "virtual pipeline stages cannot generate"
        )
    while not hasattr(model, "max_sequence_length") and hasattr(model, "module"):
        model = model.module
    return model


def _require_generating(model: Any, given: LLMOptions) -> None:
    if not getattr(model.config, "cache_mla_latents", False):
        raise ValueError("the model's config must have cache_mla_latents=True to generate")
    if given.cuda_graphs:
        cuda_graphs.require_model_fields(model.config)
    require_layout(model, Replicas(), cuda_graphs=given.cuda_graphs)
    if given.decode_context_parallel is True:
        require_shared_cache(model, given.num_speculative_tokens)
    layers = model.config.mtp_num_layers or 0
    if given.num_speculative_tokens and not layers:
        raise ValueError(
            f"num_speculative_tokens {given.num_speculative_tokens} needs a model with a "
            "multi-token-prediction (MTP) layer, and this one has none"
        )
