"""The thread that runs the model, with a model that only counts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server.service import Metrics, Service


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
    stream = service.submit([lambda llm, one=one: one for one in prompts], SamplingParams())
    found = []
    while not stream.is_over:
        found.extend(await stream.next())
    return found


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


def test_a_step_wakes_the_loop_once():
    """However many requests have grown."""

    async def collect_all(service):
        streams = [service.submit([lambda llm: "a"], SamplingParams()) for _ in range(8)]
        loop, woken = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (woken.append(args), call(*args))
        service.start()
        for stream in streams:
            assert [update.finished for update in (await stream.next()).values()] == [True]
            assert stream.is_over
        return woken

    service = Service(CountingLLM(), Metrics(), pytest.fail)
    woken = asyncio.run(collect_all(service))
    service.stop()
    assert len(woken) == 1 and service.llm.steps == 1


def test_a_caller_that_leaves():
    """Aborts what runs, once; what has ended is not aborted."""

    async def leave(service):
        stream = service.submit([lambda llm: "a", lambda llm: "b"], SamplingParams())
        stream.close()
        stream.close()
        assert stream.is_over
        over = service.submit([lambda llm: "c"], SamplingParams())
        service.start()
        await over.next()
        over.close()

    service = Service(CountingLLM(), Metrics(), pytest.fail)
    asyncio.run(leave(service))
    service.stop()
    assert service.llm.aborted == ["request-0", "request-1"]
