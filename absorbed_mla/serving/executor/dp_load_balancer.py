"""A runner over ranks that have requests of their own: which rank gets which request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core import parallel_state

from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.executor.commands import Abort, Add, Command, SetVocabulary
from absorbed_mla.serving.executor.local import LocalRunner, Runner
from absorbed_mla.serving.request_results import Progress
from absorbed_mla.serving.sampling.device_sampler import derive_seed
from absorbed_mla.serving.statistics import Statistics


class Ranks(Runner, Protocol):
    """A runner on every rank."""

    def each(self, name: str, arguments: Sequence[tuple]) -> list[Any]:
        """Call a method on every rank, with arguments of its own; returns the answers by rank."""
        ...


class GatheringRunner(LocalRunner):
    """The runner of a rank that runs the same program as the others, and gets all answers."""

    def each(self, name: str, arguments: Sequence[tuple]) -> list[Any]:
        """See :class:`Ranks`; collective."""
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        answer = getattr(self, name)(*arguments[group.rank()])
        answers: list[Any] = [None] * group.size()
        dist.all_gather_object(answers, answer, group=group)
        return answers


class DPLoadBalancer:
    """A runner that gives each request to one rank, and reports the progress of all.

    A rank with room for another request comes before one without, then one whose requests have
    fewer tokens: MLPs are computed for all ranks together, but attention and cache are a rank's
    own. A request stays on its rank, and shares cached blocks with requests there only.

    Args:
        ranks: Their runners.
        size: How many there are.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._size = ranks, size
        # What has nothing to do with single requests is theirs.
        self.wake, self.update_weights = ranks.wake, ranks.update_weights
        self.require_no_leak, self.check = ranks.require_no_leak, ranks.check
        self.silence, self.close = ranks.silence, ranks.close
        self._options = ranks.options()
        self._forget()

    def step(self, commands: Sequence[Command]) -> list[Progress]:
        """See ``Runner``; every rank takes part in the step, with or without requests."""
        sent: list[list[Command]] = [[] for _ in range(self._size)]
        for command in commands:
            if isinstance(command, Add):
                rank = self._lightest()
                sent[rank].append(self._added(command, rank))
            elif isinstance(command, SetVocabulary):
                for own in sent:
                    own.append(command)
            elif command.number in self._places:
                rank, number = self._places[command.number]
                sent[rank].append(Abort(number))
        found = self._ranks.each("step", [(own,) for own in sent])
        progress = [self._of_all(rank, one) for rank, each in enumerate(found) for one in each]
        return sorted(progress, key=lambda one: one.number)

    def sleep(self, level: int = 1) -> None:
        """See ``Runner``."""
        self._ranks.sleep(level)
        self._forget()

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        """See ``Runner``."""
        found = self._ranks.each("reset_prefix_cache", [(reset_running_requests,)] * self._size)
        return all(found)

    def options(self) -> EngineOptions:
        """Sizes of each rank's engine."""
        return self._options

    def statistics(self) -> Statistics:
        """Of all ranks' engines together."""
        return Statistics.of_engines(self._ranks.each("statistics", [()] * self._size))

    def _forget(self) -> None:
        # By rank and number there, the number in all of what has not ended.
        self._numbers: list[dict[int, int]] = [{} for _ in range(self._size)]
        # By number in all, what has not ended: its rank, and its number there.
        self._places: dict[int, tuple[int, int]] = {}
        # By rank and number in all, tokens of what has not ended.
        self._tokens: list[dict[int, int]] = [{} for _ in range(self._size)]
        # By rank, requests that it has got.
        self._num_own = [0] * self._size
        self._num_added = self._num_seeds = 0

    def _lightest(self) -> int:
        def load(rank: int) -> tuple[bool, int, int]:
            tokens = self._tokens[rank]
            return len(tokens) >= self._options.max_requests, sum(tokens.values()), len(tokens)

        return min(range(self._size), key=load)

    def _added(self, command: Add, rank: int) -> Add:
        """The command for a rank that gets a request."""
        number, self._num_added = self._num_added, self._num_added + 1
        self._places[number] = rank, self._num_own[rank]
        self._numbers[rank][self._num_own[rank]] = number
        self._num_own[rank] += 1
        self._tokens[rank][number] = len(command.prompt)
        params = command.params
        if params.seed is None:
            # That of an engine alone, so that a rank's number decides nothing.
            params = params.derived(
                seed=derive_seed(derive_seed(self._options.seed, 0), self._num_seeds)
            )
            self._num_seeds += 1
        return dataclasses.replace(command, params=params)

    def _of_all(self, rank: int, progress: Progress) -> Progress:
        """A rank's progress under the request's number in all."""
        number = self._numbers[rank][progress.number]
        self._tokens[rank][number] += len(progress.tokens)
        if progress.result is not None:
            del self._places[number], self._tokens[rank][number]
            del self._numbers[rank][progress.number]
        return dataclasses.replace(progress, number=number)
