"""Requests of load.py, how they are run, and whether they got the tokens that each has alone."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from absorbed_mla.serving.sampling.parameters import SamplingParams
from benchmarks.engine_requests import Prompts

if TYPE_CHECKING:
    from absorbed_mla import LLM

# Steps for which a client pauses at most.
_LONGEST_PAUSE = 40
# Sampled requests have one of these.
_SAMPLING = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"min_p": 0.02, "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "top_k": 100, "top_p": 0.95},
)


@dataclass(frozen=True)
class Request:
    """One request of a client."""

    prompt: Sequence[int]  # token ids
    params: SamplingParams  # with a seed
    pause: int = 0  # steps that the client waits before it sends the request
    abort_after: int | None = None  # tokens after which the client aborts it; None: never

    @property
    def num_tokens(self) -> int:
        """To generate, at most."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens


@dataclass
class Outcome:
    """What became of a request."""

    tokens: list[list[int]] = field(default_factory=list)  # of each output
    aborted: bool = False  # whether its client aborted it
    first: float | None = None  # seconds to its first token
    gaps: list[float] = field(default_factory=list)  # seconds between its tokens, of all outputs
    whole: float = 0.0  # seconds to its end


def workload(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    """Requests of mixed lengths and kinds, by ``--seed``."""
    prompts, requests = Prompts(args, vocab_size), []
    draw = prompts.draw
    for number in range(args.requests):
        prefix, own = prompts.sizes(number)
        greedy = draw.random() < 1 / 3
        params = SamplingParams(
            max_tokens=draw.randint(1, args.longest_output),
            n=2 if number % 8 == 5 else 1,
            seed=number,
            ignore_eos=True,
            **({"temperature": 0.0} if greedy else draw.choice(_SAMPLING)),
        )
        prompt = [*prefix, *prompts.tokens(own)]
        pause = draw.randint(1, _LONGEST_PAUSE) if draw.random() < 0.25 else 0
        aborted = number % 10 == 3
        limit = draw.randint(1, args.longest_output // 2) if aborted else None
        requests.append(Request(prompt, params, pause, limit))
    return requests


class _Running:
    """A request that was sent."""

    def __init__(self, number: int) -> None:
        self.number, self.outcome = number, Outcome()
        self.sent = time.perf_counter()
        # Tokens of each output, and when the last one came.
        self._seen: dict[int, tuple[int, float]] = {}

    def grow(self, tokens: Sequence[Sequence[int]]) -> None:
        """Record when tokens came."""
        now = time.perf_counter()
        for index, output in enumerate(tokens):
            before, last = self._seen.get(index, (0, None))
            new = len(output) - before
            if not new:
                continue
            self._seen[index] = len(output), now
            if last is not None:
                self.outcome.gaps += [(now - last) / new] * new
            elif self.outcome.first is None:
                self.outcome.first = now - self.sent

    def end(self, tokens: list[list[int]]) -> Outcome:
        """What became of it."""
        self.outcome.tokens = tokens
        self.outcome.whole = time.perf_counter() - self.sent
        return self.outcome


def run(llm: LLM, requests: Sequence[Request], num_clients: int) -> list[Outcome]:
    """Run requests; client ``c`` of ``C`` sends requests c, c + C, and so on, one after the other.

    Returns:
        In the order of the requests; those that did not end are left out.
    """
    # By client, the next request and the step at which it is sent.
    due = {c: (c, requests[c].pause) for c in range(min(num_clients, len(requests)))}
    running: dict[str, _Running] = {}
    outcomes: dict[int, Outcome] = {}
    step = 0
    while due or running:
        for client, (number, when) in list(due.items()):
            if when <= step:
                del due[client]
                request = requests[number]
                name = llm.add_request(request.prompt, request.params)
                running[name] = _Running(number)
        step += 1
        for output in llm.step() if running else ():
            one = running[output.request_id]
            tokens = [list(each.token_ids) for each in output.outputs]
            one.grow(tokens)
            limit = requests[one.number].abort_after
            if limit is not None and not output.finished and max(map(len, tokens)) >= limit:
                one.outcome.aborted = True
                llm.abort(output.request_id)
            elif output.finished:
                outcomes[one.number] = one.end(tokens)
                del running[output.request_id]
                following = one.number + num_clients
                if following < len(requests):
                    due[one.number % num_clients] = following, step + requests[following].pause
    while llm.has_unfinished_requests():
        llm.step()
    return [outcomes[number] for number in sorted(outcomes)]


def run_alone(llm: LLM, requests: Sequence[Request]) -> list[list[list[int]]]:
    """Tokens of every request, by output, while nothing else runs."""
    return [
        [
            one.token_ids
            for one in llm.generate([request.prompt], request.params, use_tqdm=False)[0].outputs
        ]
        for request in requests
    ]


def verdict(
    requests: Sequence[Request], outcomes: Sequence[Outcome], alone: Sequence[list[list[int]]]
) -> list[int]:
    """Numbers of the requests whose tokens are not those that they have alone."""
    if len(outcomes) != len(requests):
        return list(range(len(requests)))
    different = []
    for number, (outcome, expected) in enumerate(zip(outcomes, alone, strict=True)):
        if outcome.aborted:
            expected = [e[: len(t)] for e, t in zip(expected, outcome.tokens)]
        if outcome.tokens != expected:
            different.append(number)
    return different
