"""Prompts and sampling parameters as users give them, and as the engine gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.tokenizers.tokenizers import Tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.engine_options import EngineOptions

# A text, or token ids.
Prompt = str | Sequence[int]


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One or several prompts as a list."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


def params_of(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """Parameters of each of ``count`` prompts.

    Raises:
        ValueError: If another number is given.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if len(given) != count:
        raise ValueError(f"there are {count} prompts and {len(given)} sampling_params")
    return list(given)


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer.

    Raises:
        ValueError: If there is none.
    """
    if tokenizer is None:
        raise ValueError(
            "the model came without a tokenizer: give prompts as token ids, or "
            "LLM(..., tokenizer=FOLDER or 'bytes')"
        )
    return tokenizer


def encode(
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    sizes: EngineOptions,
    where: str = "",
) -> list[int]:
    """Token ids of a prompt that can run.

    Args:
        prompt: Text or token ids.
        params: As the user gave them.
        tokenizer: Of texts.
        sizes: Of the engine.
        where: What an error begins with.

    Raises:
        ValueError: If it cannot.
    """
    tokens = required(tokenizer).encode(prompt) if isinstance(prompt, str) else list(prompt)
    if params.stop and tokenizer is None:
        raise ValueError(f"{where}stop needs a tokenizer; stop_token_ids does not")
    vocab_size = sizes.vocab_size
    assert vocab_size is not None
    why_not = sizes.why_not(tokens, of_output(params, 0, ()), vocab_size, sizes.step_tokens)
    if why_not:
        raise ValueError(f"{where}{why_not}")
    return tokens


def of_output(params: SamplingParams, index: int, ends: Sequence[int]) -> SamplingParams:
    """What the engine gets for one of a prompt's outputs.

    Args:
        params: As the user gave them.
        index: Of the output.
        ends: Tokens that end it, besides ``params.stop_token_ids``.
    """
    seed = params.seed
    if seed is not None and index:
        # It imports the engine's modules, which take long.
        from absorbed_mla.serving.sampling.sampler import derive_seed

        seed = derive_seed(seed, index)
    stop = dict.fromkeys([*ends, *params.stop_token_ids])
    return params.replace(n=1, seed=seed, stop=(), stop_token_ids=tuple(stop))
