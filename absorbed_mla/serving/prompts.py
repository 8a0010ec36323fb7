"""Prompts: what users give, and the token ids and parameters that the engine gets of it."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.structured_output.grammar import GrammarChecks
from absorbed_mla.serving.tokenizers.tokenizers import Message, Tokenizer

if TYPE_CHECKING:
    from absorbed_mla.serving.engine_options import EngineOptions

# A text; token ids, also as an array of numpy or a tensor; or either as vLLM's dicts have it.
Prompt = str | Sequence[int] | Mapping[str, Any] | Any
_TEXT, _TOKENS, _SALT = "prompt", "prompt_token_ids", "cache_salt"
# It is hashed for each output, between two steps.
_LONGEST_SALT = 1024
# Characters of texts that are not refused by their number: their tokens are counted in no time.
_FEW_CHARACTERS = 2**16


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt that can run.

    Attributes:
        encoder: That has found so.
        text: If it was given as one.
        tokens: Token ids.
        of_engine: See :func:`of_output`.
        end_tokens: That end its texts, besides ``stop_token_ids``.
        cache_salt: Of the prompts that share cached blocks with it.
        lora_request: Its adapter.
        priority: Smaller ones come earlier.
    """

    encoder: PromptEncoder
    text: str | None
    tokens: list[int]
    of_engine: SamplingParams
    end_tokens: Sequence[int] = ()
    cache_salt: str | None = None
    lora_request: LoRARequest | None = None
    priority: int = 0


class PromptEncoder:
    """Makes prompts that can run of what users give, in any thread: long texts take seconds.

    Args:
        tokenizer: Of texts; None: prompts are token ids.
        end_tokens: That end the model's texts.
        options: The engine's.
        enable_lora: Whether requests may have adapters.

    Attributes:
        end_tokens: As given.
        max_model_len: Maximum number of tokens of a prompt and what is generated after it.
        vocab_size: Token ids are below it.
        grammars: Of structured outputs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        end_tokens: tuple[int, ...],
        options: EngineOptions,
        enable_lora: bool,
    ) -> None:
        self._tokenizer, self.end_tokens = tokenizer, end_tokens
        self._options, self._enable_lora = options, enable_lora
        assert options.vocab_size is not None
        self.max_model_len, self.vocab_size = options.max_sequence_length, options.vocab_size
        self.grammars = GrammarChecks(tokenizer, options.vocab_size)
        # The parameters that were last given, and what the engine gets of them.
        self._last_of_engine: tuple[SamplingParams, SamplingParams] | None = None

    def encode(
        self,
        prompt: Prompt,
        params: SamplingParams,
        where: str = "",
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> EncodedPrompt:
        """A prompt that can run.

        Args:
            prompt: As the user gave it.
            params: As the user gave them.
            where: What an error begins with.
            lora_request: Its adapter.
            priority: Of the request.

        Raises:
            ValueError: If the prompt cannot run.
        """
        self.check_lora([lora_request], where)
        tokenizer, options = self._tokenizer, self._options
        if params.truncate_prompt_tokens is None:
            self._require_few_tokens(prompt, where)
        try:
            text, tokens, salt = _parts_of(prompt)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        if tokens is None:
            assert text is not None
            if params.truncate_prompt_tokens is None:
                self.require_few_characters(text, where)
            tokens = required(tokenizer).encode(text)
        most = params.truncate_prompt_tokens
        if most == -1:
            most = max(1, self.max_model_len - (params.max_tokens or 1))
        tokens = tokens if most is None else tokens[-most:]
        if params.stop and tokenizer is None:
            raise ValueError(f"{where}stop needs a tokenizer; stop_token_ids does not")
        try:
            of_engine = self._of_request(params, tokens)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error
        why_not = options.why_not(tokens, of_engine, self.vocab_size, options.step_tokens, priority)
        if why_not:
            raise ValueError(f"{where}{why_not}")
        ends = self._ends(params)
        return EncodedPrompt(self, text, tokens, of_engine, ends, salt, lora_request, priority)

    def check_lora(self, requests: Collection[LoRARequest | None], where: str = "") -> None:
        """Check adapters of requests that arrive together.

        Raises:
            ValueError: If they cannot have them.
        """
        for one in requests:
            if not isinstance(one, LoRARequest | None):
                raise ValueError(f"{where}lora_request must be a LoRARequest, got {one!r:.200}")
            if one is not None and not self._enable_lora:
                raise ValueError(f"{where}lora_request needs LLM(enable_lora=True), got False")

    def encode_chat(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation, for any thread.

        Args:
            options: For the chat template.

        Raises:
            ValueError: If there is no chat template, or the conversation is longer than any that
                can run.
        """
        tokenizer = required(self._tokenizer)
        render = getattr(tokenizer, "render", None)
        if render is None:
            return tokenizer.chat(messages, **options)
        text = render(messages, **options)
        self.require_few_characters(text)
        return tokenizer.encode(text, begin=False)

    def _require_few_tokens(self, prompt: Prompt, where: str) -> None:
        """Check that token ids may fit, before any is looked at."""
        tokens = prompt.get(_TOKENS) if isinstance(prompt, Mapping) else prompt
        if isinstance(tokens, str) or not hasattr(tokens, "__len__"):
            return
        if len(tokens) > max(_FEW_CHARACTERS, self.max_model_len):
            raise ValueError(
                f"{where}the prompt has {len(tokens)} tokens and must be shorter than "
                f"{self.max_model_len}"
            )

    def require_few_characters(self, text: str, where: str = "") -> None:
        """Check that a text may fit, without its tokens, which take long to find if it does not.

        Raises:
            ValueError: If it has more characters than any that fits.
        """
        longest = getattr(self._tokenizer, "longest_token", None)
        if longest is not None and len(text) > max(_FEW_CHARACTERS, longest * self.max_model_len):
            raise ValueError(
                f"{where}the prompt has {len(text)} characters, of which a token has {longest} at "
                f"most, and must be shorter than {self.max_model_len} tokens"
            )

    def _of_request(self, params: SamplingParams, tokens: list[int]) -> SamplingParams:
        """What the engine gets of a request's parameters, also of those that its prompt decides."""
        of_engine = self._of_engine(params)
        if params.structured_outputs is not None:
            of_engine = of_engine.derived(grammar=self.grammars.check(params.structured_outputs))
        if (find := params.find_reasoning_ends) is not None:
            ends = find(tokens, self._tokenizer)
            of_engine = of_engine.derived(find_reasoning_ends=None, reasoning_ends=ends)
        return of_engine

    def _ends(self, params: SamplingParams) -> tuple[int, ...]:
        """The model's end tokens, for a request that they end."""
        return () if params.ignore_eos else self.end_tokens

    def _of_engine(self, params: SamplingParams) -> SamplingParams:
        """Found once for the prompts of a call: the tokens of many texts take long."""
        found = self._last_of_engine
        if found is None or found[0] is not params:
            found = params, of_output(params, self._ends(params), self._tokenizer)
            self._last_of_engine = found
        return found[1]


def of_output(
    params: SamplingParams, ends: Sequence[int], tokenizer: Tokenizer | None
) -> SamplingParams:
    """What the engine gets for the first of a prompt's outputs.

    Args:
        params: As the user gave them.
        ends: Tokens that end it, besides ``params.stop_token_ids``.

    Raises:
        ValueError: If texts of ``bad_words`` have no tokenizer.
    """
    return params.derived(
        n=1,
        stop=(),
        truncate_prompt_tokens=None,
        bad_words=_tokens_of_words(params.bad_words, tokenizer),
        stop_token_ids=tuple(dict.fromkeys([*ends, *params.stop_token_ids])),
    )


def _tokens_of_words(
    words: Sequence[str | Sequence[int]], tokenizer: Tokenizer | None
) -> list[tuple[int, ...]]:
    """Token ids of words; texts also behind a space, where that is not the same tokens' end."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        if tokenizer is None:
            raise ValueError("bad_words needs a tokenizer for texts; lists of token ids do not")
        alone, behind = (tuple(tokenizer.encode(s + word, begin=False)) for s in ("", " "))
        found[alone] = None
        if behind[-len(alone) :] != alone:
            found[behind] = None
    found.pop((), None)
    return list(found)


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


def _parts_of(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """A prompt's text and token ids, of which a dict may have both, and its ``cache_salt``.

    Raises:
        ValueError: If it is no prompt, or asks for more than a text.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt), None
    others = any(v is not None for k, v in prompt.items() if k not in (_TEXT, _TOKENS, _SALT))
    text, tokens = prompt.get(_TEXT), prompt.get(_TOKENS)
    if others or (text is None and tokens is None) or not isinstance(text, str | None):
        raise ValueError(
            f"a prompt's dict must have {_TEXT!r}, a text, or {_TOKENS!r}, and nothing else but "
            f"{_SALT!r}, got {prompt!r:.200}"
        )
    salt = prompt.get(_SALT)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= _LONGEST_SALT):
        raise ValueError(
            f"{_SALT} must be a text that is not empty, at most {_LONGEST_SALT} characters, got "
            f"{salt!r:.200}"
        )
    return text, None if tokens is None else _token_ids(tokens), salt


def _token_ids(given: Any) -> list[int]:
    try:
        return list(map(operator.index, list_of(given)))
    except TypeError as error:
        raise ValueError(f"token ids must be integers, got {given!r:.200}") from error


def list_of(given: Any) -> list:
    """A list, with Python's numbers in place of an array's."""
    return given.tolist() if hasattr(given, "tolist") else list(given)
