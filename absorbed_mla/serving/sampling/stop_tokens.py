"""Where a request ends: with drafts at the first of its stop tokens, with a grammar at its end."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest

from absorbed_mla.serving.megatron_engine.names import STOP_WORDS
from absorbed_mla.serving.sampling.device_sampler import SampledRequest


def end_at_first_stop_token(host: DynamicInferenceEngine) -> None:
    """Let a step that adds several tokens to a request end it at the first stop token among them.

    Megatron asks for one stop word after the other, and from the newest token backwards: of several
    in a step, it takes the last one of the first word in the list, and keeps those before it.
    """
    most = host.num_speculative_tokens + 1

    def check(request: DynamicInferenceRequest) -> tuple[bool, int]:
        """Whether the request has a stop token, and how many tokens behind it were removed."""
        # Each stop word is one token; see ``SamplingParams.to_host``.
        stop = {token for [token] in request.stop_word_ids or ()}
        # Those of earlier steps would have ended it.
        new = request.generated_tokens[-most:]
        for place, token in enumerate(new):
            if token in stop:
                behind = len(new) - 1 - place
                if behind:
                    request.generated_tokens = request.generated_tokens[:-behind]
                return True, behind
        return False, 0

    STOP_WORDS.replace(host, check)


def end_with_grammar(host: DynamicInferenceEngine, requests: Mapping[int, SampledRequest]) -> None:
    """Let a request end, as behind a stop word, when its grammar allows nothing more.

    Args:
        requests: By number, those that may be in a step.
    """
    before = STOP_WORDS.of(host)

    def check(request: DynamicInferenceRequest) -> tuple[bool, int]:
        """Whether the request ends, and how many tokens behind its end were removed."""
        found, removed = before(request)
        sampled = requests.get(request.request_id)
        if sampled is None or sampled.grammar is None:
            return found, removed
        # After an eviction, its prompt has what was generated.
        earlier = len(request.prompt_tokens) - len(sampled.prompt)
        beyond = sampled.grammar.advance(request.generated_tokens, earlier)
        if beyond:
            request.generated_tokens = request.generated_tokens[:-beyond]
        return found or sampled.grammar.is_complete, removed + beyond

    STOP_WORDS.replace(host, check)
