"""Draws the tokens of a decode step, as ``sampler.py`` does, by operations that do not vary."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from absorbed_mla.serving.sampling.draw import NUM_NUMBERS, draw_by_numbers, most_likely
from absorbed_mla.serving.sampling.sampler import Randoms, SampledRequest

# Rows of the table: that of random numbers, and of those that stay while a request runs.
_RANDOM = 1
_OTHERS = [row for row in range(NUM_NUMBERS) if row != _RANDOM]


class Kind(Enum):
    """What has to be computed for the tokens of a step."""

    GREEDY = "greedy"  # all requests take the most likely token
    SAMPLED = "sampled"  # some are drawn from all tokens
    FILTERED = "filtered"  # some from the most likely ones, which have to be found


class Draws:
    """Draws tokens of rows whose parameters are in a table on the device.

    A token is that of ``sampler.draw``, to the bit: by the same functions, row by row.

    Args:
        max_rows: Of a step.
        vocabulary: Its size.
        own: Whether the sampler itself draws all tokens, because ranks have to agree on them.

    Attributes:
        kind: Of the next step; None: the sampler itself must draw, since tokens so far count.
        changes: Whether :meth:`begin` must be called again for the next step.
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

    def begin(self, requests: Sequence[SampledRequest], positions: Sequence[int]) -> None:
        """Draw for these requests, by row, from the next step on."""
        self._requests = list(requests)
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

    def move(self, order: Sequence[int]) -> None:
        """Rows are others; ``order`` has, for each of them, the row that it was."""
        fewer = len(order) < len(self._requests)
        self._requests = [self._requests[row] for row in order]
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

    def _find_sampled(self) -> None:
        rows = enumerate(self._requests)
        self._sampled = [row for row, request in rows if not request.params.is_greedy]
        self._randoms = Randoms(self._requests[row].seed for row in self._sampled)

    def _kind(self) -> Kind | None:
        # Where tokens so far count for the next one.
        count = (one.avoids_stop_tokens or one.params.has_penalties for one in self._requests)
        if self._own or any(count):
            return None
        params = (request.params for request in self._requests)
        sampled = [one for one in params if not one.is_greedy]
        if not sampled:
            return Kind.GREEDY
        return Kind.FILTERED if any(one.has_filters for one in sampled) else Kind.SAMPLED
