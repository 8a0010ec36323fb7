"""Output of generate.py: text while it is generated, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from absorbed_mla.generation.requests import Progress, Result
from absorbed_mla.generation.text import TextStream

_TITLE_WIDTH = 60


@dataclass(frozen=True)
class Totals:
    """Totals over all prompts.

    Attributes:
        prompts: Number of prompts.
        failed: Number of prompts that could not be continued.
        prompt_tokens: Tokens of the other prompts.
        generated_tokens: Over all prompts.
        seconds: Time of all forward passes, prefill included.
    """

    prompts: int
    failed: int
    prompt_tokens: int
    generated_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, over all prompts."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class TextOutput:
    """Shows the first text that is incomplete while it is generated, and the others in order.

    Args:
        titles: The prompts, for headings.
        streams: Of each prompt, what turns tokens into text.
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
        self._results: list[Result | None] = [None] * len(streams)
        self._current = -1
        self._next()

    def __call__(self, progress: Progress) -> None:
        """Show the progress of one prompt, or hold it until the texts before are complete."""
        number, result = progress.number, progress.result
        stream = self._streams[number]
        self._held[number] += stream.push(progress.tokens)
        if result is not None:
            self._results[number] = result
            self._held[number] += stream.finish()
            if result.error:
                print(f"prompt {number + 1}: error: {result.error}", file=self._err, flush=True)
        self._show()

    def finish(self, totals: Totals) -> None:
        """Print the totals."""
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
            result = self._results[self._current]
            if result is None:
                break
            self._out.write("" if result.error else "\n")
            self._next()
        self._out.flush()

    def _next(self) -> None:
        self._current += 1
        if 1 < len(self._titles) > self._current:
            title = " ".join(self._titles[self._current].split())
            short = title[: _TITLE_WIDTH - 3] + "..." if len(title) > _TITLE_WIDTH else title
            self._out.write(f"== {self._current + 1}: {short}\n")


class JsonOutput:
    """Prints a JSON line for each prompt when it ends, and one with the totals at the end.

    Args:
        titles: The prompts.
        streams: Of each prompt, what turns tokens into text.
        out: Where the lines go.
    """

    def __init__(self, titles: Sequence[str], streams: Sequence[TextStream], out: TextIO) -> None:
        self._titles, self._streams, self._out = titles, streams, out

    def __call__(self, progress: Progress) -> None:
        """Print the line of a prompt that has ended."""
        number, result = progress.number, progress.result
        if result is None:
            return
        stream = self._streams[number]
        row = {"index": number, "prompt": self._titles[number]}
        if result.error:
            row["error"] = result.error
        else:
            row["text"] = stream.push(result.tokens) + stream.finish()
            row["tokens"], row["finish_reason"] = result.tokens, result.finish
            if result.log_probs:
                row["log_probs"] = result.log_probs
        print(json.dumps(row), file=self._out, flush=True)

    def finish(self, totals: Totals) -> None:
        """Print the line with the totals."""
        row = {**vars(totals), "tokens_per_second": totals.tokens_per_second}
        print(json.dumps(row), file=self._out, flush=True)
