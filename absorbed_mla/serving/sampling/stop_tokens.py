"""Where a request with drafts ends: at the first of its stop tokens."""

from __future__ import annotations

from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest

from absorbed_mla.serving.megatron_engine.names import STOP_WORDS


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
