"""Requests that end: by which step, and until when they have rows in steps on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

from absorbed_mla.serving.scheduler.in_flight_step import Flight
from absorbed_mla.serving.scheduler.input_batch import ContextRows
from absorbed_mla.serving.scheduler.running_requests import Members


@dataclass(frozen=True)
class Ends:
    """Rows of a step whose tokens have come, by what that means to their requests.

    Attributes:
        gone: Of requests that had ended before; their tokens are not taken.
        told: Of requests that are to end without the token: aborted, or after a stop word.
        ending: Of requests that end, with or without it.
    """

    gone: set[int]
    told: set[int]
    ending: set[int]

    @property
    def rows(self) -> set[int]:
        """That have no part in the next step."""
        return self.gone | self.ending

    def end(
        self,
        members: Members,
        flight: Flight,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None,
    ) -> list[DynamicInferenceRequestRecord]:
        """End the requests; returns Megatron's records of them, by row."""
        records = []
        for row in sorted(self.ending):
            last = (None, None) if row in self.told else (tokens[row], log_probs and log_probs[row])
            records.append(members.end(flight.numbers[row], *last))
        return records


class Endings:
    """Knows which requests have a row in the last step on the device, but have ended.

    Args:
        host: Megatron's engine.
    """

    def __init__(self, host: DynamicInferenceEngine) -> None:
        self._host = host
        self._ended: set[int] = set()

    def forget(self) -> None:
        """No step is on the device."""
        self._ended.clear()

    def foreseen(self, flight: Flight) -> set[int]:
        """Rows of the last step that have no part in the next one, whatever their tokens are."""
        return flight.rows_of(self._ended) | self._told_to_end(flight) | flight.at_their_ends

    def of(self, flight: Flight, tokens: Sequence[int]) -> Ends:
        """What the tokens of a step mean; nothing changes."""
        gone, told = flight.rows_of(self._ended), self._told_to_end(flight)
        stopped = {r for r, token in enumerate(tokens) if token == flight.stop_tokens[r]}
        return Ends(gone, told, (told | stopped | flight.at_their_ends) - gone)

    def note(self, flight: Flight, ends: Ends, ahead: Collection[int]) -> None:
        """A step's tokens are taken; ``ahead`` are the requests of the one after it, if any."""
        self._ended -= {flight.numbers[row] for row in ends.gone}
        self._ended |= {flight.numbers[row] for row in ends.ending} & set(ahead)

    def are_all(self, numbers: Collection[int]) -> bool:
        """Whether the last step on the device has no request that goes on."""
        return bool(self._ended) and self._ended.issuperset(numbers)

    def _told_to_end(self, flight: Flight) -> set[int]:
        """Rows of requests that end without the token: aborted, or after a stop word."""
        return flight.rows_of(self._host.stop_word_finished_request_ids)


def leave_out(controller: TextGenerationController, rows: ContextRows, gone: set[int]) -> None:
    """Remove rows of requests that ended before, for Megatron to finish the step."""
    if not gone:
        return
    order = rows.remove(gone)
    kept = torch.tensor(order, device=controller._sampled_tokens_cuda.device)
    tokens = controller._sampled_tokens_cuda[kept]
    controller._sampled_tokens_cuda[: len(order)] = tokens
    controller._all_logits_cuda[0, : len(order)] = controller._all_logits_cuda[0, kept]


def leave_none(context: DynamicInferenceContext) -> None:
    """Let the context have no requests, because all of the last step have ended."""
    count = context.total_request_count
    context.update_requests(torch.zeros(count, dtype=torch.uint8), torch.zeros(count).long())
