"""Output of generate.py: text while it is generated, or JSON lines; prompts are counted from 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TextIO

from absorbed_mla.serving.outputs import CompletionOutput

_TITLE_WIDTH = 60


class TextOutput:
    """Shows the first text that is incomplete while it is generated, and the others in order.

    Args:
        prompts: For headings.
        out: Where texts go.
        err: Where errors and the totals go.
    """

    def __init__(self, prompts: Sequence[str], out: TextIO, err: TextIO) -> None:
        self._prompts, self._out, self._err = prompts, out, err
        self._texts = [""] * len(prompts)
        # What comes after the text of each prompt that has ended.
        self._ends: dict[int, str] = {}
        self._current = self._written = 0
        self._write_title()

    def fail(self, number: int, error: str) -> None:
        """A prompt cannot be continued."""
        print(f"prompt {number + 1}: error: {error}", file=self._err, flush=True)
        self._ends[number] = ""
        self._write()

    def show(self, number: int, completion: CompletionOutput) -> None:
        """A text has grown or ended; it is held back until those before it are complete."""
        self._texts[number] = completion.text
        if completion.finish_reason is not None:
            self._ends[number] = "\n"
        self._write()

    def finish(self, totals: Mapping[str, float]) -> None:
        """All prompts have ended."""
        failed = f" ({totals['failed']} failed)" if totals["failed"] else ""
        noun = "prompt" if totals["prompts"] == 1 else "prompts"
        print(
            f"{totals['prompts']} {noun}{failed}, {totals['generated_tokens']} tokens in "
            f"{totals['seconds']:.2f} s: {totals['tokens_per_second']:.1f} tokens/s",
            file=self._err,
            flush=True,
        )

    def _write(self) -> None:
        while self._current < len(self._texts):
            text = self._texts[self._current]
            self._out.write(text[self._written :])
            self._written = len(text)
            if self._current not in self._ends:
                break
            self._out.write(self._ends[self._current])
            self._current, self._written = self._current + 1, 0
            self._write_title()
        self._out.flush()

    def _write_title(self) -> None:
        if 1 < len(self._prompts) > self._current:
            title = " ".join(self._prompts[self._current].split())
            short = title[: _TITLE_WIDTH - 3] + "..." if len(title) > _TITLE_WIDTH else title
            self._out.write(f"== {self._current + 1}: {short}\n")


class JsonOutput:
    """Prints a JSON line for each prompt when it ends, and one with the totals at the end.

    Args:
        prompts: Their texts.
        max_tokens: A text that ends before this, and by no stop token, has filled the context.
        out: Where the lines go.
    """

    def __init__(self, prompts: Sequence[str], max_tokens: int, out: TextIO) -> None:
        self._prompts, self._max_tokens, self._out = prompts, max_tokens, out

    def fail(self, number: int, error: str) -> None:
        """See :class:`TextOutput`."""
        self._print({"index": number, "prompt": self._prompts[number], "error": error})

    def show(self, number: int, completion: CompletionOutput) -> None:
        """See :class:`TextOutput`."""
        reason, tokens = completion.finish_reason, completion.token_ids
        if reason is None:
            return
        if reason == "length" and len(tokens) < self._max_tokens:
            reason = "context"
        row = {"index": number, "prompt": self._prompts[number], "text": completion.text}
        row |= {"tokens": tokens, "finish_reason": reason}
        if completion.logprobs is not None:
            row["log_probs"] = completion.token_logprobs
        self._print(row)

    def finish(self, totals: Mapping[str, float]) -> None:
        """See :class:`TextOutput`."""
        self._print(totals)

    def _print(self, row: Mapping[str, object]) -> None:
        print(json.dumps(row), file=self._out, flush=True)
