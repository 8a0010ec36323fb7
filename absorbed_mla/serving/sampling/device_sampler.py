"""The device sampler: samples a token for every row of logits by parameters that the row has.

A token's weight is its probability relative to the most likely token's, as an integer of scale
2**40: tokens that are less likely than that are never drawn, and sums are exact in any order. A
row's filters leave some tokens, in the order of their logits, the largest first, and of equal ones
in that of the vocabulary:

- ``min_p``: those with at least this share of the most likely token's probability;
- ``top_k``: so many of these;
- ``top_p``: of those, as many as it takes for this part of the sum of their weights.

Of the tokens that are left, in the order of the vocabulary, the row's token is the first one with
which the sum of weights exceeds the row's random number times the whole sum. So filters that leave
all tokens change nothing. A row whose largest logit is NaN or infinite has no token: -1. The tokens
of a CPU are not a GPU's, whose exponential function rounds otherwise.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from absorbed_mla.serving.sampling.parameters import SamplingParams

if TYPE_CHECKING:
    from absorbed_mla.serving.structured_output.request_grammar import RequestGrammar

_SCALE = 2.0**40
# The temperature, the random number in [0, 1), min_p, top_k (at least the vocabulary's size where
# it is no limit), top_p, and whether the row is sampled: 1, or 0 for the most likely token.
NUM_NUMBERS = 6
# What a GPU's kernels read; other types are converted.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Which of them is the random number, and which stay while a request runs.
_RANDOM = 1
_OTHERS = [row for row in range(NUM_NUMBERS) if row != _RANDOM]


@dataclass
class SampledRequest:
    """What the sampler knows of a running request.

    Attributes:
        params: Of the request.
        seed: Of its random numbers.
        prompt: As the request came, also after an eviction.
        generated: Tokens so far.
        in_prompt: Which tokens of the vocabulary are in the prompt, bool [vocabulary], once a
            penalty asks.
        bias: Added to the logits of all tokens, fp32 [vocabulary], once it is asked for.
        stop_tokens: That stop the request, int64, once they must not be drawn.
        number: Of the request; -1: not known.
        grammar: That its text is of, if it is to be of one.
    """

    params: SamplingParams
    seed: int
    prompt: Sequence[int]
    generated: list[int] = field(default_factory=list)
    in_prompt: Tensor | None = None
    bias: Tensor | None = None
    stop_tokens: Tensor | None = None
    number: int = -1
    grammar: RequestGrammar | None = None
    _numbers: tuple[float, float, int, float, bool] | None = None
    # By their last token but one.
    _bad_words: dict[int, list[Sequence[int]]] | None = None

    def bad_words_after(self, token: int | None) -> Sequence[Sequence[int]]:
        """Those of ``bad_words`` that have several tokens, of which one before the last is this."""
        if self._bad_words is None:
            self._bad_words = {}
            for word in self.params.bad_words:
                if len(word) > 1:
                    self._bad_words.setdefault(word[-2], []).append(word)
        return () if token is None else self._bad_words.get(token, ())

    def numbers(self, vocabulary: int) -> tuple[float, float, int, float, bool]:
        """Temperature, ``min_p``, ``top_k``, ``top_p``, and whether it samples; found once.

        Args:
            vocabulary: Its size, always the same.
        """
        if self._numbers is None:
            params = self.params
            # One that float32 can divide by: neither 0 nor infinity.
            temperature = min(max(params.temperature, 1e-30), 1e30)
            top_k = min(params.top_k or vocabulary, vocabulary)
            sampled = not params.is_greedy
            self._numbers = temperature, params.min_p, top_k, params.top_p, sampled
        return self._numbers

    @property
    def avoids_stop_tokens(self) -> bool:
        """Whether it is too short yet to draw a token that stops it."""
        short = len(self.generated) < self.params.min_tokens
        return short and bool(self.params.stop_token_ids)


class Kind(Enum):
    """What has to be computed for the tokens of a step."""

    GREEDY = "greedy"  # all requests take the most likely token
    SAMPLED = "sampled"  # some are drawn from all tokens
    FILTERED = "filtered"  # some from the most likely ones, which have to be found


class DeviceSampler:
    """Samples tokens of rows whose sampling parameters are in a table on the device.

    A token is that of ``sampler.draw``, to the bit: by the same functions, row by row. No operation
    depends on a value, so that a CUDA graph may hold them.

    Args:
        own: Whether the sampler itself draws all tokens, because ranks have to agree on them.

    Attributes:
        kind: Of the next step; None: the sampler itself must draw, since tokens so far count.
        changes: Whether :meth:`begin` must be called again for the next step.
        constrained: Rows whose requests have grammars.
    """

    def __init__(self, max_rows: int, vocabulary: int, *, own: bool) -> None:
        device = torch.cuda.current_device()
        sizes = NUM_NUMBERS, max_rows
        self._staged = torch.zeros(sizes, dtype=torch.float64, pin_memory=True)
        # Rows that are padding are drawn by numbers that can be computed with.
        self._staged[:] = torch.tensor([[1.0], [0.0], [0.0], [vocabulary], [1.0], [0.0]])
        self._table = torch.zeros(sizes, dtype=torch.float64, device=device)
        self._own, self._vocabulary = own, vocabulary
        self._requests: list[SampledRequest] = []
        # Those that draw, by row; their random numbers, and of the next step their values.
        self._sampled: list[int] = []
        self._randoms = Randoms(())
        self._random: list[float] = []
        self.kind: Kind | None = None
        self.changes = False
        self.constrained: list[int] = []

    def begin(self, requests: Sequence[SampledRequest], positions: Sequence[int]) -> None:
        """Draw for these requests, by row, from the next step on."""
        self._requests = list(requests)
        self._find_constrained()
        self.changes = any(request.avoids_stop_tokens for request in requests)
        self.kind = self._kind()
        if self.kind in (None, Kind.GREEDY):
            return
        rows = [request.numbers(self._vocabulary) for request in requests]
        self._staged.numpy()[_OTHERS, : len(rows)] = tuple(zip(*rows))
        self._find_sampled()
        self._random = self._randoms.at([positions[row] for row in self._sampled])

    def prepare(self, positions: Sequence[int]) -> None:
        """Find the random numbers of the tokens behind these positions, for the step after this."""
        if self.kind not in (None, Kind.GREEDY):
            self._random = self._randoms.at([positions[row] + 1 for row in self._sampled])

    def reorder(self, order: Sequence[int]) -> None:
        """Rows are others; ``order`` has, for each of them, the row that it was."""
        fewer = len(order) < len(self._requests)
        self._requests = [self._requests[row] for row in order]
        if self.constrained:
            self._find_constrained()
        if self.kind is None:
            # The request because of which the sampler draws may have ended.
            self.changes = True
            return
        if self.kind is Kind.GREEDY:
            return
        table = self._staged.numpy()
        table[:, : len(order)] = table[:, order]
        places = {row: place for place, row in enumerate(self._sampled)}
        former = [places[row] for row in order if row in places]
        self._sampled = [row for row, was in enumerate(order) if was in places]
        self._randoms = self._randoms.of(former)
        self._random = [self._random[place] for place in former]
        if fewer:
            self.kind = self._kind()

    def publish(self) -> None:
        """Send the numbers of the next step to the device, which reads host memory after that."""
        if self.kind not in (None, Kind.GREEDY):
            self._staged.numpy()[_RANDOM, self._sampled] = self._random
            with torch.inference_mode():
                self._table.copy_(self._staged, non_blocking=True)

    def draw(self, logits: Tensor, kind: Kind) -> Tensor:
        """Tokens of the first rows, int64 [rows], of logits [rows, vocabulary]."""
        if kind is Kind.GREEDY:
            return most_likely(logits)
        table = self._table[:, : len(logits)]
        return draw_by_numbers(logits, table, filters=kind is Kind.FILTERED)

    def constrain(self, logits: Tensor) -> Tensor:
        """Logits of the first rows in which grammars' other tokens cannot be drawn.

        The tokens of the steps before this one must be known. It is no work for a CUDA graph.
        """
        rows = [(row, self._requests[row], ()) for row in self.constrained]
        return constrain(logits, rows)

    def _find_constrained(self) -> None:
        rows = enumerate(self._requests)
        self.constrained = [row for row, request in rows if request.grammar is not None]

    def _find_sampled(self) -> None:
        rows = enumerate(self._requests)
        self._sampled = [row for row, request in rows if not request.params.is_greedy]
        self._randoms = Randoms(self._requests[row].seed for row in self._sampled)

    def _kind(self) -> Kind | None:
        # Where tokens so far count for the next one, or logits are others than the model's.
        own = (one.avoids_stop_tokens or one.params.changes_logits for one in self._requests)
        if self._own or any(own):
            return None
        params = (request.params for request in self._requests)
        sampled = [one for one in params if not one.is_greedy]
        if not sampled:
            return Kind.GREEDY
        return Kind.FILTERED if any(one.has_filters for one in sampled) else Kind.SAMPLED


def constrain(logits: Tensor, rows: Sequence[tuple[int, SampledRequest, Sequence[int]]]) -> Tensor:
    """Logits [rows, vocabulary] in which tokens that grammars do not allow cannot be drawn.

    Args:
        rows: With grammars: the row, its request, and drafts before its token.
    """
    grammars = []
    for row, request, drafts in rows:
        assert request.grammar is not None
        request.grammar.advance(request.generated)
        behind = request.grammar.behind_reasoning(drafts)
        if behind is not None:
            grammars.append((row, request.grammar, behind))
    return grammars[0][1].bitmask.apply(logits, grammars) if grammars else logits


def most_likely(logits: Tensor) -> Tensor:
    """The first token with the largest logit of each row, int64 [rows]; logits and -1 as below."""
    if not logits.is_cuda or not logits.numel():
        return _most_likely(logits)
    # Imported here: machines without a GPU may have no Triton.
    from absorbed_mla.kernels.sampling.argmax import find_most_likely

    return find_most_likely(_readable(logits))


def draw_by_numbers(logits: Tensor, numbers: Tensor, *, filters: bool) -> Tensor:
    """Draw a token for each row.

    A CUDA graph may hold it: nothing waits for the device, and no shape depends on values.

    Args:
        logits: [rows, vocabulary], any floating dtype.
        numbers: float64 [NUM_NUMBERS, rows], any strides.
        filters: Whether a sampled row may have a ``top_k`` or a ``top_p`` that is a limit.

    Returns:
        int64 [rows]; -1 where the largest logit is NaN or infinite.
    """
    if logits.is_cuda and logits.numel():
        from absorbed_mla.kernels.sampling.draw import draw_tokens

        return draw_tokens(_readable(logits), numbers, filters=filters)
    logits = logits.float()
    return draw_by_weights(logits, weigh(logits, numbers), numbers, filters=filters)


def weigh(logits: Tensor, numbers: Tensor) -> Tensor:
    """Weights of all tokens by PyTorch's functions, without those below ``min_p``.

    Args:
        logits: fp32 [rows, vocabulary].
        numbers: As in :func:`draw_by_numbers`.

    Returns:
        int64 [rows, vocabulary].
    """
    temperature, _, min_p = numbers[:3].unsqueeze(-1)
    relative = (logits - logits.amax(-1, keepdim=True)) / temperature.float()
    if relative.is_cuda or not len(relative):
        shares = relative.exp()
    else:
        # A CPU's exp rounds otherwise at the end of a tensor than inside it: rows one by one.
        shares = torch.stack([row.exp() for row in relative])
    shares = shares.masked_fill(~(shares >= min_p), 0)
    return (shares * _SCALE).long()


def draw_by_weights(logits: Tensor, weights: Tensor, numbers: Tensor, *, filters: bool) -> Tensor:
    """:func:`draw_by_numbers` by PyTorch's functions, with a sort, on any device.

    Args:
        logits: fp32 [rows, vocabulary].
        weights: int64 [rows, vocabulary], see :func:`weigh`.
    """
    _, random, _, top_k, top_p, sampled = numbers.unsqueeze(-1)
    if filters:
        weights = _filtered(weights, logits, top_k, top_p)
    tokens = _most_likely(logits)
    drawn = find_place(weights, random).squeeze(-1)
    return torch.where((sampled.squeeze(-1) > 0) & (tokens >= 0), drawn, tokens)


def find_place(weights: Tensor, random: Tensor) -> Tensor:
    """The first token with which the sum of weights exceeds a part of all of them.

    Args:
        weights: int64 [rows, vocabulary], at least 0.
        random: The part, [rows, 1], from 0 to below 1.

    Returns:
        int64 [rows, 1].
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = (random * total).long().clamp(max=total - 1)
    return torch.searchsorted(sums, target, right=True).clamp(max=weights.shape[-1] - 1)


def _most_likely(logits: Tensor) -> Tensor:
    """:func:`most_likely` by PyTorch's functions."""
    tokens = logits.argmax(-1)
    return tokens.where(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite(), -1)


def _readable(logits: Tensor) -> Tensor:
    logits = logits if logits.dtype in _DTYPES else logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _filtered(weights: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Weights of the tokens that ``top_k`` and ``top_p`` leave."""
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    rank = torch.arange(weights.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, 0)
    before = ordered.cumsum(-1) - ordered
    total = ordered.sum(-1, keepdim=True)
    # The token that crosses the limit is left in, so that there is always one.
    limit = (top_p * total).ceil().long().clamp(max=total)
    ordered = ordered.masked_fill(before >= limit, 0)
    return torch.zeros_like(weights).scatter_(-1, order, ordered)


def derive_seed(seed: int, index: int) -> int:
    """A seed that looks unrelated to ``seed``, for the ``index``-th of something."""
    return int.from_bytes(_hash(seed, index), "little", signed=True)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed's token at a position: 53 bits."""
    return (int.from_bytes(_hash(seed, position), "little") >> 11) / 2**53


class Randoms:
    """The random numbers of some seeds, :func:`uniform` of each, in half the time.

    Args:
        seeds: In the order of the numbers.
    """

    def __init__(self, seeds: Iterable[int]) -> None:
        # What a hash begins with is read once.
        packed = [struct.pack("<q", seed) for seed in seeds]
        self._begun = [hashlib.blake2b(seed, digest_size=8) for seed in packed]

    def of(self, places: Iterable[int]) -> Randoms:
        """Those of some of the seeds, by their places among all."""
        found = Randoms(())
        found._begun = [self._begun[place] for place in places]
        return found

    def at(self, positions: Iterable[int]) -> list[float]:
        """The numbers of the seeds' tokens at these positions, one each."""
        digests = []
        for begun, position in zip(self._begun, positions):
            hasher = begun.copy()
            hasher.update(position.to_bytes(8, "little", signed=True))
            digests.append(hasher.digest())
        words = struct.unpack(f"<{len(digests)}Q", b"".join(digests))
        return [(word >> 11) / 2**53 for word in words]


def _hash(seed: int, index: int) -> bytes:
    return hashlib.blake2b(struct.pack("<qq", seed, index), digest_size=8).digest()
