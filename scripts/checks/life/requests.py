"""Requests of mixed traffic: random prompts, conversations and sampling parameters."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from absorbed_mla import LLM
from absorbed_mla.lora.request import LoRARequest
from absorbed_mla.serving.outputs import CompletionOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.structured_output.parameters import StructuredOutputsParams

# Conversations begin with one of so many prefixes, or with none.
_NUM_PREFIXES = 8
_BLOCK = 64
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_GRAMMARS = ({"regex": "[a-z]{1,9}"}, {"choice": ["yes", "no", "maybe"]}, {"json": _SCHEMA})
_Draw = Callable[[random.Random, int], object]


def _tokens(rng: random.Random, vocabulary: int, count: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def _stops(rng: random.Random, _: int) -> list[str]:
    return [*rng.sample(string.ascii_letters, 3), rng.choice("ae\ufffd") + rng.choice("st\ufffd")]


def _structured(rng: random.Random, _: int) -> object:
    return StructuredOutputsParams(**rng.choice(_GRAMMARS))


# Parameters of some requests: how often they are given, and a value. The first ones let steps be
# launched ahead.
_PLAIN: dict[str, tuple[float, _Draw]] = {
    "top_k": (0.2, lambda rng, _: rng.choice((1, 3, 20))),
    "top_p": (0.2, lambda rng, _: rng.choice((0.5, 0.9))),
    "min_p": (0.1, lambda rng, _: 0.05),
    "stop_token_ids": (0.3, lambda rng, size: _tokens(rng, size, rng.choice((1, 4)))),
    "stop": (0.3, _stops),
    "include_stop_str_in_output": (0.3, lambda *_: True),
    "ignore_eos": (0.3, lambda *_: True),
    "logprobs": (0.5, lambda rng, _: rng.choice((0, 0, 1, 5))),
    "n": (0.1, lambda rng, _: rng.choice((2, 3))),
    "structured_outputs": (0.25, _structured),
}
_OTHERS: dict[str, tuple[float, _Draw]] = {
    "repetition_penalty": (0.3, lambda rng, _: rng.choice((0.8, 1.3))),
    "presence_penalty": (0.3, lambda rng, _: rng.choice((-0.5, 0.7))),
    "frequency_penalty": (0.3, lambda rng, _: rng.choice((-0.2, 0.4))),
    "min_tokens": (0.3, lambda rng, _: rng.choice((1, 3, 6))),
    "logit_bias": (
        0.2,
        lambda rng, size: dict.fromkeys(_tokens(rng, size, 9), rng.choice((-9, 4))),
    ),
    "allowed_token_ids": (0.1, lambda rng, size: rng.sample(range(size), size // 2)),
    "bad_words": (0.2, lambda rng, size: [_tokens(rng, size, 1), _tokens(rng, size, 2)]),
}


@dataclass(frozen=True)
class Entry:
    """A request, and the answer that it has alone.

    Attributes:
        prompt: Token ids.
        params: Whose random numbers have a seed.
        is_plain: Whether steps with it can be launched ahead.
        adapter: If it has one.
        outputs: Of the request alone.
    """

    prompt: list[int]
    params: SamplingParams
    is_plain: bool
    adapter: LoRARequest | None
    outputs: list[CompletionOutput]


def answered(llm: LLM, name: str, adapters: Sequence[LoRARequest]) -> list[Entry]:
    """The requests of a conversation, of which each contains the former ones and their answers.

    Args:
        llm: Answers each alone.
        name: Determines all random numbers.
        adapters: Of which some conversations have one.
    """
    vocabulary, context = llm.tokenizer.vocab_size, llm.max_model_len
    rng, found, prompt = random.Random(name), list[Entry](), list[int]()
    is_plain = rng.random() < 0.5
    if rng.random() < 0.3:
        number = rng.randrange(_NUM_PREFIXES)
        prompt = _tokens(random.Random(number), vocabulary, 25 * number + 30)
    prompt = (prompt + _tokens(rng, vocabulary, _length(rng, context)))[: context - 1]
    adapter = None
    for turn in range(rng.choice((1, 1, 2, 4))):
        # Another one finds no block of the same beginning in the cache.
        if not turn or rng.random() < 0.2:
            adapter = rng.choice(adapters) if rng.random() < 0.4 else None
        params = _params(rng, vocabulary, is_plain)
        [output] = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)
        found.append(Entry(prompt, params, is_plain, adapter, output.outputs))
        new = _tokens(rng, vocabulary, rng.randint(1, 70))
        prompt = [*prompt, *output.outputs[0].token_ids, *new]
        if len(prompt) >= context:
            break
    return found


def _length(rng: random.Random, context: int) -> int:
    # Many that need another block soon, at about the same time.
    blocks = rng.choice((1, 1, 1, 1, 2, context // _BLOCK))
    edge = _BLOCK * blocks - rng.randint(-1, 8)
    return min(rng.choice((rng.randint(1, 90), edge, edge)), context - 1)


def _params(rng: random.Random, vocabulary: int, is_plain: bool) -> SamplingParams:
    most = rng.choice((1, 2, 4, 8, 16, 40, 80)) if rng.random() < 0.985 else None
    given: dict = {"max_tokens": most, "temperature": 0.0}
    if rng.random() < 0.7:
        given |= {"temperature": rng.choice((0.4, 1.0, 1.5)), "seed": rng.getrandbits(40)}
    for name, (share, draw) in (_PLAIN if is_plain else _PLAIN | _OTHERS).items():
        if rng.random() < share:
            given[name] = draw(rng, vocabulary)
    if most is not None and "min_tokens" in given:
        given["min_tokens"] = min(given["min_tokens"], most)
    return SamplingParams(**given)


def difference(got: CompletionOutput, want: CompletionOutput) -> str:
    """How an output differs from that of the request alone, of which an aborted one is a part.

    Token ids, log-probabilities to the bit, text and reasons count. ``""``: it does not.
    """
    if got.finish_reason == "abort":
        count = len(got.token_ids)
        logprobs = None if want.logprobs is None else want.logprobs[:count]
        is_equal = (got.token_ids, got.logprobs) == (want.token_ids[:count], logprobs)
    else:
        is_equal = got == want
    return "" if is_equal else f"output {got.index} is {got}, alone {want}"
