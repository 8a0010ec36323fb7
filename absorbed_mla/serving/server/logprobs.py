"""Log-probabilities as JSON: OpenAI's of chats and of completions, and vLLM's of prompts.

A log-probability that is NaN, for which there is no JSON, raises ``ModelFailed``.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from absorbed_mla.serving.outputs import Logprob, PositionLogprobs
from absorbed_mla.serving.server.failures import ModelFailed

Json = dict[str, Any]
# In place of minus infinity, which JSON lacks: that of a token that cannot be drawn.
_LEAST_LOGPROB = -9999.0


def _logprob(one: Logprob) -> float:
    if math.isnan(one.logprob):
        raise ModelFailed("the model's log-probabilities are NaN")
    return max(one.logprob, _LEAST_LOGPROB)


class TextOffsets:
    """Where the tokens of a text begin in it, in characters; for one after the other."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0

    def add(self, one: Logprob, text: str | None = None) -> int:
        """Where the next token begins; in the middle of a character, where that does.

        Args:
            text: The whole, which may lack special tokens and a first space; None: it has all.
        """
        begin = self._length
        added = self._decoder.decode(one.token_bytes or b"")
        if text is not None and not text.startswith(added, begin):
            added = added.lstrip(" ")
            added = added if text.startswith(added, begin) else ""
        self._length += len(added)
        return begin


def _token(token: int, one: Logprob, by_id: bool) -> str:
    if by_id:
        return f"token_id:{token}"
    if one.token_bytes is not None:
        return one.token_bytes.decode(errors="replace")
    return f"token_id:{token}" if one.decoded_token is None else one.decoded_token


def chat_logprobs(positions: list[PositionLogprobs], *, by_id: bool = False) -> Json:
    """Of a chat's answer: tokens with their bytes, and the most likely ones.

    Args:
        by_id: Whether tokens are named by their ids.
    """
    content = []
    for place in positions:
        entries = [
            {
                "token": _token(token, one, by_id),
                "logprob": _logprob(one),
                "bytes": None if one.token_bytes is None else list(one.token_bytes),
            }
            for token, one in place.items()
        ]
        # The first is the generated token; the most likely ones have a rank.
        ranked = [entry for entry, one in zip(entries, place.values()) if one.rank is not None]
        content.append({**entries[0], "top_logprobs": ranked})
    return {"content": content}


def text_logprobs(
    positions: Sequence[PositionLogprobs],
    offsets: TextOffsets,
    *,
    by_id: bool = False,
    echoed: str | None = None,
) -> Json:
    """Of a completion: tokens by their names, which are those of ``top_logprobs``.

    Args:
        positions: Each with its token first.
        offsets: Of the tokens before these.
        by_id: Whether tokens are named by their ids.
        echoed: The text, if it begins with the prompt's, whose first token has no log-probability.
    """
    named = [dict(zip(_names(place, by_id), place.values())) for place in positions]
    firsts = [next(iter(place.values())) for place in named]
    unknown = 0 if echoed is None else 1
    return {
        "tokens": [next(iter(place)) for place in named],
        "token_logprobs": [None] * unknown + [_logprob(one) for one in firsts[unknown:]],
        "top_logprobs": [None] * unknown
        + [{name: _logprob(one) for name, one in place.items()} for place in named[unknown:]],
        "text_offset": [offsets.add(one, echoed) for one in firsts],
    }


def _names(place: PositionLogprobs, by_id: bool) -> list[str]:
    """A name of each token of a position: its text, unless another one has it or it has none."""
    names: list[str] = []
    for token, one in place.items():
        name = None if by_id else _text_name(one)
        names.append(f"token_id:{token}" if name is None or name in names else name)
    return names


def _text_name(one: Logprob) -> str | None:
    """The text that a token adds; OpenAI's name of bytes that are part of a character."""
    if one.token_bytes is None:
        return one.decoded_token
    try:
        return one.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.token_bytes)


def prompt_position(place: PositionLogprobs) -> Json:
    """Of a position of the prompt, by token id, as vLLM has it."""
    return {
        str(token): {
            "logprob": _logprob(one),
            "rank": one.rank,
            "decoded_token": one.decoded_token,
        }
        for token, one in place.items()
    }
