"""What the user sees: text while it grows, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from generation.engine import Generation
from generation.text import TextStream

_TITLE_WIDTH = 60


@dataclass(frozen=True)
class Totals:
    """About all prompts.

    Attributes:
        prompts: How many.
        failed: Of these, those that could not be continued.
        prompt_tokens: Of those that could.
        generated_tokens: Of all.
        seconds: From the first forward to the last, prefill included.
    """

    prompts: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated, over all prompts."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class TextOutput:
    """Shows the first text that has not ended while it grows; others follow in their order.

    Args:
        titles: The prompts.
        streams: Their texts.
        out: Where texts go.
        err: Where errors and the totals go.
    """

    def __init__(
        self,
        titles: Sequence[str],
        streams: Sequence[TextStream],
        out: TextIO,
        err: TextIO,
    ) -> None:
        self._titles, self._streams = titles, streams
        self._out, self._err = out, err
        self._held = [""] * len(streams)
        self._ends: list[Generation | None] = [None] * len(streams)
        self._current = -1
        self._next()

    def __call__(self, number: int, tokens: list[int], end: Generation | None) -> None:
        """See ``engine.Progress``."""
        stream = self._streams[number]
        self._held[number] += stream.push(tokens)
        if end is not None:
            self._ends[number] = end
            self._held[number] += stream.finish()
            if end.error:
                print(f"prompt {number + 1}: error: {end.error}", file=self._err, flush=True)
        self._show()

    def finish(self, totals: Totals) -> None:
        """Say how fast it was."""
        failed = f" ({totals.failed} failed)" if totals.failed else ""
        noun = "prompt" if totals.prompts == 1 else "prompts"
        print(
            f"{totals.prompts} {noun}{failed}, {totals.generated_tokens} tokens in "
            f"{totals.seconds:.2f} s: {totals.tokens_per_second:.1f} tokens/s",
            file=self._err,
            flush=True,
        )

    def _show(self) -> None:
        while self._current < len(self._streams):
            self._out.write(self._held[self._current])
            self._held[self._current] = ""
            end = self._ends[self._current]
            if end is None:
                break
            self._out.write("" if end.error else "\n")
            self._next()
        self._out.flush()

    def _next(self) -> None:
        self._current += 1
        if 1 < len(self._titles) > self._current:
            title = " ".join(self._titles[self._current].split())
            short = title[: _TITLE_WIDTH - 3] + "..." if len(title) > _TITLE_WIDTH else title
            self._out.write(f"== {self._current + 1}: {short}\n")


class JsonOutput:
    """A JSON object per line: one for each prompt as it ends, the last about all.

    Args:
        titles: The prompts.
        streams: Their texts.
        out: Where they go.
    """

    def __init__(self, titles: Sequence[str], streams: Sequence[TextStream], out: TextIO) -> None:
        self._titles, self._streams, self._out = titles, streams, out

    def __call__(self, number: int, tokens: list[int], end: Generation | None) -> None:
        """See ``engine.Progress``."""
        if end is None:
            return
        stream = self._streams[number]
        row = {"index": number, "prompt": self._titles[number]}
        if end.error:
            row["error"] = end.error
        else:
            row["text"] = stream.push(end.tokens) + stream.finish()
            row["tokens"], row["finish_reason"] = end.tokens, end.finish
            if end.log_probs:
                row["log_probs"] = end.log_probs
        print(json.dumps(row), file=self._out, flush=True)

    def finish(self, totals: Totals) -> None:
        """The last line."""
        row = {**vars(totals), "tokens_per_second": totals.tokens_per_second}
        print(json.dumps(row), file=self._out, flush=True)
