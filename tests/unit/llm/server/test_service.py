"""The thread that runs the model, with a model that only counts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from absorbed_mla.generation.sampling import SamplingParams
from absorbed_mla.llm.outputs import RequestOutput
from absorbed_mla.llm.server.metrics import Metrics
from absorbed_mla.llm.server.service import Service


class CountingLLM:
    """Ends each request in its first step; refuses the prompt "bad"."""

    num_running = 0

    def __init__(self):
        self.requests, self.aborted, self.steps = [], [], 0

    def add_request(self, prompt, params, name):
        if prompt == "bad":
            raise ValueError("a bad prompt")
        self.requests.append(name)

    def abort(self, name):
        # As the real one: of a request that has ended, nothing is left to do.
        if name in self.requests:
            self.aborted.append(name)
            self.requests.remove(name)

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        self.steps += 1
        ended, self.requests = self.requests, []
        return [RequestOutput(name, None, [], [], finished=True) for name in ended]

    def check(self):
        pass


@contextlib.contextmanager
def running():
    service = Service(CountingLLM(), Metrics(), pytest.fail)
    service.start()
    yield service
    service.stop()


async def collect(service, *prompts):
    makers = [lambda llm, one=one: one for one in prompts]
    return [i async for i, _ in service.updates(makers, SamplingParams())]


def test_all_prompts_of_a_call():
    with running() as service:
        assert sorted(asyncio.run(collect(service, "a", "b", "c"))) == [0, 1, 2]
        assert service.llm.steps == 1, "prompts of one call begin in one step"


def test_none_runs_if_one_is_refused():
    with running() as service:
        with pytest.raises(ValueError, match="a bad prompt"):
            asyncio.run(collect(service, "a", "b", "bad"))
        # The model is free, and nothing of the call was stepped.
        asyncio.run(collect(service, "c"))
        assert service.llm.aborted == ["request-0", "request-1"] and service.llm.steps == 1
