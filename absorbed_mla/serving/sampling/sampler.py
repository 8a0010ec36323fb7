"""Draws the next token of every request, each by its own parameters, seed and position.

A request's token does not depend on what else is in the batch: every number that decides is
either compared, or an integer, whose sums are exact in any order. With equal logits (parity mode)
the tokens are therefore equal to the bit, alone or in a batch, evicted or not, with drafts or
without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.sampling import Sampling
from torch import Tensor

from absorbed_mla.serving.sampling.device_sampler import (
    SampledRequest,
    constrain,
    draw_by_numbers,
    most_likely,
    uniform,
)


@dataclass(frozen=True)
class _Row:
    """A row of logits: its request, the position of the token to draw, drafts before that."""

    request: SampledRequest
    position: int
    drafts: Sequence[int] = ()

    @property
    def known(self) -> int | None:
        """The token, if it is there already: a chunk that ends inside of a prompt.

        Megatron discards what is drawn there, but returns its log-probability as the prompt's.
        """
        prompt, generated = self.request.prompt, self.request.generated
        if self.position < len(prompt):
            return prompt[self.position]
        after = self.position - len(prompt)
        return generated[after] if after < len(generated) else None

    @property
    def last(self) -> int | None:
        """The last token of the output so far."""
        output = self.drafts or self.request.generated
        return output[-1] if output else None

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether the output so far ends with these tokens."""
        count = len(tokens)
        output = [*self.request.generated[-count:], *self.drafts]
        return not count or output[-count:] == list(tokens)


class RequestSampler(Sampling):
    """Megatron's interface of a sampler, for requests with parameters of their own.

    Args:
        num_speculative_tokens: Tokens that MTP layers draft for every request and step.
        agree: Returns the tokens that all ranks go on with; None: those that were drawn.

    Attributes:
        requests: By number, those that may be in a step.
    """

    def __init__(
        self, num_speculative_tokens: int = 0, agree: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._num_drafts, self._agree = num_speculative_tokens, agree
        self.requests: dict[int, SampledRequest] = {}
        # Of the last tokens that the sampler has drawn: all rows, and which of them have no token,
        # bool [rows] in pinned memory; None: that has been asked, or a caller sees to it.
        self._rows: Sequence[_Row] = ()
        self._missing: Tensor | None = None
        self._taken: list[Tensor] | None = None
        # Of the MTP layers that have drafted a token in this step.
        self._depth = 0

    def failed(self) -> dict[int, int]:
        """Requests for which the step that has ended had no token; forgotten then.

        Returns:
            By number, how many of the step's tokens come before the missing one: 0 but for drafts.
        """
        found: dict[int, int] = {}
        missing, self._missing = self._missing, None
        rows, self._rows = self._rows, ()
        # The step has waited for its tokens, which come after these.
        if missing is not None and missing.any():
            before: dict[int, int] = {}
            for row, flag in zip(rows, missing.tolist()):
                number = row.request.number
                if flag:
                    found.setdefault(number, before.get(number, 0))
                before[number] = before.get(number, 0) + 1
        return found

    @contextlib.contextmanager
    def missing_on_device(self) -> Iterator[list[Tensor]]:
        """Sample inside the block for a caller that sees to missing tokens itself.

        The overlap scheduler may launch a step before :meth:`failed` is called for the step before
        it, which must not get these.

        Yields:
            A list that gets one tensor for each call: which rows have no token, bool [rows], on the
            device of the logits; nobody waits for it.
        """
        self._taken = taken = []
        try:
            yield taken
        finally:
            self._taken = None

    def clear(self) -> None:
        """Forget all requests."""
        self.requests.clear()
        self._missing, self._rows = None, ()

    def sample_kernel(
        self,
        logits: Tensor,
        n: int,
        context: DynamicInferenceContext,
        *,
        gather_indices: Tensor | None = None,
        output: Tensor | None = None,
        **_,
    ) -> Tensor:
        """Draw one token for each of the first ``n`` running requests; see Megatron's class.

        With speculative decoding, Megatron calls this for drafts only, once for each MTP layer.
        """
        ahead = 0
        if self._num_drafts:
            self._depth += 1
            ahead = self._depth
        rows = [_Row(request, end + ahead) for request, _, end in self._running(context)[:n]]
        places = slice(n) if gather_indices is None else gather_indices[:n]
        tokens = self._drawn(logits[places], rows, are_drafts=ahead > 0)
        return tokens if output is None else output.copy_(tokens)

    def sample_speculative(
        self,
        required_logits: Tensor,
        num_decode: int,
        num_prefill: int,
        num_speculative_tokens: int,
        context: DynamicInferenceContext,
        *,
        gather_indices: Tensor | None = None,
        **_,
    ) -> Tensor:
        """Draw a token after each draft of the decoding requests, and one for each other request.

        A draft is right if it is the token drawn at its position, so the tokens that are accepted
        are those of decoding without drafts.
        """
        self._depth = 0
        running = self._running(context)[: num_decode + num_prefill]
        width, decoding = num_speculative_tokens + 1, running[:num_decode]
        inputs: list[list[int]] = []
        if any(request.params.changes_logits or request.grammar for request, *_ in decoding):
            tokens = context.gpu_view.token_to_input_ids[: num_decode * width]
            inputs = tokens.view(num_decode, width).tolist()
        rows = []
        for i, (request, start, end) in enumerate(running):
            if i < num_decode:
                drafts = inputs[i][1:] if inputs else ()
                rows += [_Row(request, start + 1 + j, drafts[:j]) for j in range(width)]
            else:
                rows.append(_Row(request, end))
        places = slice(len(rows)) if gather_indices is None else gather_indices[: len(rows)]
        return self._drawn(required_logits[places], rows)

    def log_probs_kernel(
        self,
        logits: Tensor,
        context: DynamicInferenceContext,
        *,
        token_to_request_index: Tensor | None = None,
    ) -> Tensor:
        """Not available: log-probabilities are the model's, before penalties and filters.

        Raises:
            ValueError: Always; Megatron calls it with ``logprobs_mode="processed_logprobs"`` only.
        """
        raise ValueError(
            f"logprobs_mode must be 'raw_logprobs', got {context.config.logprobs_mode!r}"
        )

    def _drawn(self, logits: Tensor, rows: Sequence[_Row], *, are_drafts: bool = False) -> Tensor:
        if not are_drafts:
            # Drafts need not be right.
            logits = _constrained(logits, rows)
        tokens = draw(logits, rows)
        if self._agree is not None:
            tokens = self._agree(tokens)
        if self._taken is not None:
            self._taken.append(tokens < 0)
        elif not are_drafts:
            self._rows = rows
            self._missing = (tokens < 0).to("cpu", non_blocking=True)
        # The model reads them in the next step, before the request is ended.
        return tokens.clamp_(min=0)

    def _running(self, context: DynamicInferenceContext) -> list[tuple[SampledRequest, int, int]]:
        """Running requests in the order of their rows, with the tokens before and after a step."""
        rows = slice(context.paused_request_count, context.total_request_count)
        numbers = context.request_ids[rows].tolist()
        starts = context.request_kv_length_offsets[rows].tolist()
        lengths = context.request_query_lengths[rows].tolist()
        return [
            (self.requests[number], start, start + length)
            for number, start, length in zip(numbers, starts, lengths)
        ]


def _constrained(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Logits without the tokens that grammars of the rows' requests do not allow."""
    found = [(i, row) for i, row in enumerate(rows) if row.request.grammar and row.known is None]
    return constrain(logits, [(i, row.request, row.drafts) for i, row in found])


def draw(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: [rows, vocabulary], any floating dtype; not changed.
        rows: Their requests.

    Returns:
        int64 [rows]; -1 where the largest logit is NaN or infinite.
    """
    logits = _without_stop_tokens(logits, rows)
    for change, asks in ((_biased, "has_bias"), (_penalised, "has_penalties")):
        changed = [i for i, row in enumerate(rows) if getattr(row.request.params, asks)]
        if changed:
            logits = logits.float()
            index = torch.tensor(changed, device=logits.device)
            values = change(logits[index], [rows[i] for i in changed])
            logits = logits.index_copy(0, index, values)
    sampled = [row.request.params for row in rows if not row.request.params.is_greedy]
    if sampled:
        numbers = [draw_numbers(row.request, row.position, logits.shape[-1]) for row in rows]
        table = torch.tensor(numbers, dtype=torch.float64, device=logits.device).t()
        filters = any(params.has_filters for params in sampled)
        tokens = draw_by_numbers(logits, table, filters=filters)
    else:
        tokens = most_likely(logits)
    for i, row in enumerate(rows):
        if row.known is not None:
            tokens[i] = row.known
    return tokens


def _without_stop_tokens(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Logits in which requests that are too short yet cannot draw a token that stops them."""
    places = [
        (i, _stop_tokens(row.request, logits))
        for i, row in enumerate(rows)
        if row.position - len(row.request.prompt) < row.request.params.min_tokens
    ]
    index = [(torch.full_like(tokens, i), tokens) for i, tokens in places if len(tokens)]
    if not index:
        return logits
    both = tuple(map(torch.cat, zip(*index)))
    return logits.index_put(both, logits.new_tensor(-torch.inf))


def _stop_tokens(request: SampledRequest, logits: Tensor) -> Tensor:
    """Found once, because there may be many, in each of many steps."""
    if request.stop_tokens is None:
        known = [token for token in request.params.stop_token_ids if token < logits.shape[-1]]
        request.stop_tokens = _index(known, logits)
    return request.stop_tokens


def _without(logits: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """Logits in which some tokens cannot be drawn, each with its row."""
    if not places:
        return logits
    index = torch.tensor(places, device=logits.device).unbind(-1)
    return logits.index_put(index, logits.new_tensor(-torch.inf))


def _biased(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Logits [rows, vocabulary] with their requests' biases, of the tokens that may be drawn."""
    places = [
        (i, word[-1])
        for i, row in enumerate(rows)
        for word in row.request.bad_words_after(row.last)
        if row.follows(word[:-1])
    ]
    return _without(logits + torch.stack([_bias(row.request, logits) for row in rows]), places)


def _bias(request: SampledRequest, logits: Tensor) -> Tensor:
    """Computed once, because many tokens may have one."""
    if request.bias is None:
        allowed, biases = request.params.allowed_token_ids, request.params.logit_bias or {}
        bias = logits.new_zeros(logits.shape[-1])
        if allowed is not None:
            bias = torch.full_like(bias, -torch.inf).index_fill_(0, _index(allowed, logits), 0.0)
        words = [word[0] for word in request.params.bad_words if len(word) == 1]
        bias.index_fill_(0, _index(words, logits), -torch.inf)
        values = bias.new_tensor([*biases.values()])
        request.bias = bias.index_add_(0, _index([*biases], logits), values)
    return request.bias


def _index(tokens: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _penalised(logits: Tensor, rows: Sequence[_Row]) -> Tensor:
    """Logits [rows, vocabulary] with the penalties of their requests."""
    params = [row.request.params for row in rows]
    output = _counts([[*row.request.generated, *row.drafts] for row in rows], logits)
    in_prompt = torch.stack([_in_prompt(row.request, logits) for row in rows])
    seen = in_prompt | (output > 0)
    factor = _column((p.repetition_penalty for p in params), logits)
    logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    frequency = _column((p.frequency_penalty for p in params), logits)
    presence = _column((p.presence_penalty for p in params), logits)
    return logits - frequency * output - presence * (output > 0)


def _in_prompt(request: SampledRequest, logits: Tensor) -> Tensor:
    """Computed once, because a prompt may be long."""
    if request.in_prompt is None:
        [counts] = _counts([request.prompt], logits[:1])
        request.in_prompt = counts > 0
    return request.in_prompt


def _counts(texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """How often each token of the vocabulary is in each text, float32 [texts, vocabulary]."""
    tokens = [token for text in texts for token in text]
    row = torch.arange(len(texts)).repeat_interleave(torch.tensor([len(text) for text in texts]))
    index = (row.to(logits.device), _index(tokens, logits))
    # Sums of ones are exact in any order.
    one = logits.new_ones(())
    return torch.zeros_like(logits).index_put_(index, one, accumulate=True)


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    """One value per row, [rows, 1]."""
    found = torch.tensor(list(values), dtype=like.dtype, device=like.device)
    return found.unsqueeze(-1)


def draw_numbers(
    request: SampledRequest, position: int, vocabulary: int
) -> tuple[float, float, float, int, float, bool]:
    """The numbers of a row for ``device_sampler.draw_by_numbers``, in their order."""
    temperature, *others = request.numbers(vocabulary)
    return temperature, uniform(request.seed, position), *others
