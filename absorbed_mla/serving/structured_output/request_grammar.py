"""The grammars of an engine's requests, each where its request's output has brought it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.structured_output.bitmask import PackedBitmask
from absorbed_mla.serving.structured_output.grammar import grammar_of, matcher_of
from absorbed_mla.serving.structured_output.vocabulary import TokenVocabulary

# Grammars that were compiled last.
_MOST_COMPILED = 64


class RequestGrammar:
    """The grammar of one request, and its tokens so far.

    Args:
        matcher: llguidance's, of this request alone.
        stop_tokens: That end the request.
        reasoning_ends: Token ids, several ways, that end what is thought before the text; none: the
            text begins with the output. Until then all tokens are allowed.

    Attributes:
        bitmask: Where the tokens that it allows are written.
        is_complete: Whether the text is whole, and nothing may follow it.
    """

    def __init__(
        self,
        matcher: Future[Any],
        stop_tokens: Sequence[int],
        bitmask: PackedBitmask,
        reasoning_ends: Sequence[Sequence[int]] = (),
    ) -> None:
        self._future, self._stop_tokens, self.bitmask = matcher, frozenset(stop_tokens), bitmask
        # Output tokens that it has read.
        self._count = 0
        # While something is thought, and the last tokens of that.
        self._reasoning_ends = [list(end) for end in reasoning_ends]
        self._thought: list[int] = []
        self.is_complete = self._failed = False

    @property
    def _matcher(self) -> Any:
        return self._future.result()

    def advance(self, tokens: Sequence[int], before: int = 0) -> int:
        """Read what is new of the output.

        Args:
            tokens: Of the output.
            before: How many there are before these, which it has read.

        Returns:
            How many of them are behind the end of a complete text.
        """
        if not self.is_complete and self._count < before + len(tokens):
            assert self._count >= before, "it has read what came before"
            for token in tokens[self._count - before :]:
                self._count += 1
                self._read(token)
                if self.is_complete:
                    break
        return before + len(tokens) - self._count if self.is_complete else 0

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the text is whole with this output."""
        self.advance(tokens)
        return self.is_complete

    def behind_reasoning(self, drafts: Sequence[int]) -> Sequence[int] | None:
        """Those of the drafts behind the output that are not thought; None: all of them are."""
        if not self._reasoning_ends:
            return drafts
        thought = [*self._thought, *drafts]
        for left in range(len(drafts) - 1, -1, -1):
            if self._ends_reasoning(thought[: len(thought) - left]):
                return drafts[len(drafts) - left :]
        return None

    def _ends_reasoning(self, thought: Sequence[int]) -> bool:
        return any(thought[-len(end) :] == end for end in self._reasoning_ends)

    def _read(self, token: int) -> None:
        if self._reasoning_ends:
            longest = max(map(len, self._reasoning_ends))
            self._thought = [*self._thought, token][-longest:]
            if self._ends_reasoning(self._thought):
                self._reasoning_ends = []
            return
        matcher = self._matcher
        if token in self._stop_tokens and matcher.is_accepting():
            self.is_complete = True
        elif not self._failed:
            self._failed = not matcher.consume_token(token)
            self.is_complete = not self._failed and matcher.is_stopped()

    def masks(self, row: int, drafts: Sequence[int]) -> list[tuple[Any, int]]:
        """Have the tokens written that may follow the output and these drafts.

        Args:
            row: Of the bitmask.
            drafts: Tokens behind the output that may turn out to be others.

        Returns:
            The matcher with the row, if it has to compute them.
        """
        if self._failed:
            # No token: the request ends with an error.
            self.bitmask.fill(row, 0)
        elif self.is_complete:
            # Nobody takes the token.
            self.bitmask.fill(row, 0xFF)
        elif drafts:
            self._mask_behind(row, drafts)
        else:
            return [(self._matcher, row)]
        return []

    def _mask_behind(self, row: int, drafts: Sequence[int]) -> None:
        matcher = self._matcher
        read = matcher.try_consume_tokens([*drafts])
        if read == len(drafts) and not matcher.is_stopped():
            self.bitmask.compute([(matcher, row)])
            self.place_stop_tokens(row)
        else:
            # A draft that is not allowed is not the token that is drawn in its place.
            self.bitmask.fill(row, 0xFF)
        matcher.rollback(read)

    def place_stop_tokens(self, row: int) -> None:
        """Let stop tokens be drawn where the text may end, and nowhere else."""
        if self._matcher.is_error():
            self._failed = True
            self.bitmask.fill(row, 0)
            return
        ends = self.bitmask.may_end(row)
        for token in self._stop_tokens:
            self.bitmask.allow(row, token, ends)


class RequestGrammars:
    """Compiles the grammars of an engine's requests, in a thread of its own.

    Args:
        vocabulary: Of the tokens that the engine draws; also an attribute.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.vocabulary, self._tokenizer = vocabulary, vocabulary.for_grammars()
        self._bitmask = PackedBitmask(len(vocabulary.tokens))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiled: dict[str, Future[Any]] = {}

    def of(self, params: SamplingParams) -> RequestGrammar:
        """The grammar of a request, which is there when its first token is drawn."""
        assert params.structured_outputs is not None
        grammar = params.grammar or grammar_of(params.structured_outputs)
        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            compiled = self._threads.submit(matcher_of, grammar, self._tokenizer)
        self._compiled[grammar] = compiled
        if len(self._compiled) > _MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        matcher = self._threads.submit(lambda: compiled.result().deep_copy())
        return RequestGrammar(matcher, params.stop_token_ids, self._bitmask, params.reasoning_ends)

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
