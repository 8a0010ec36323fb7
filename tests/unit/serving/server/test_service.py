"""The thread that runs the model, with a model that only counts."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import pytest

from absorbed_mla.serving.outputs import RequestOutput
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.server import service as services
from absorbed_mla.serving.server.failures import ServerBusy, ServiceStopped
from absorbed_mla.serving.server.metrics import Metrics
from absorbed_mla.serving.server.service import Service
from absorbed_mla.serving.statistics import Statistics
from tests.support.llm import until


class CountingLLM:
    """Ends each request in its first step; refuses the prompt "bad"."""

    is_ready = True

    def __init__(self):
        self.requests, self.aborted, self.steps = [], [], 0
        self.prompt_encoder = SimpleNamespace(encode=lambda prompt, params, **of_request: prompt)

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

    def statistics(self):
        return Statistics()

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
        until(lambda: service._commands.qsize() == 8)
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
    """Aborts what runs, once; what has ended is not aborted, nor what was never begun."""

    async def leave(service):
        begun, go = threading.Event(), threading.Event()
        waiting = lambda llm: (begun.set(), go.wait(20), "a")[2]  # noqa: E731
        early = service.submit([waiting, lambda llm: "b"], SamplingParams())
        assert begun.wait(20)
        early.close()
        go.set()
        late = service.submit([lambda llm: "c", lambda llm: "d"], SamplingParams())
        # Its end, itself, and the other one.
        until(lambda: service._commands.qsize() == 3)
        service._take_commands()
        late.close()
        late.close()
        assert early.is_over and late.is_over
        over = service.submit([lambda llm: "e"], SamplingParams())
        service.start()
        await over.next()
        over.close()

    service = Service(CountingLLM(), Metrics(), pytest.fail)
    asyncio.run(leave(service))
    service.stop()
    assert service.llm.aborted == ["request-2", "request-3"]


class TestTokenizing:
    """Nobody waits for the tokens of another one's prompt, but those with long ones."""

    LONG = 1 << 20

    @pytest.fixture
    def slow(self):
        """A prompt that waits until the test is over."""
        go = threading.Event()
        yield lambda llm: (go.wait(20), "slow")[1]
        go.set()

    def test_model_and_short_prompts_go_on(self, slow, monkeypatch):
        monkeypatch.setattr(services, "_MOST_WAITING", self.LONG + 100)

        async def ask(service):
            service.submit([slow], SamplingParams(), self.LONG)
            for _ in range(3):
                assert sorted(await collect(service, "a")) == [0]
            for _ in range(2):
                assert await service.tokenize(lambda llm: 5, 100) == 5

        with running() as service:
            asyncio.run(asyncio.wait_for(ask(service), 10))
            assert len(service.llm.requests) == 0 and service.llm.steps == 3

    def test_too_many_wait(self, slow, monkeypatch):
        monkeypatch.setattr(services, "_MOST_WAITING", 3 * self.LONG)

        async def ask(service):
            streams = [service.submit([slow], SamplingParams(), self.LONG) for _ in range(3)]
            with pytest.raises(ServerBusy, match="too many large requests wait"):
                service.submit([slow], SamplingParams(), 1)
            return streams

        with running() as service:
            asyncio.run(ask(service))

    def test_those_that_wait_hear_of_the_end(self):
        """They wait for the thread, not for the model."""
        go = threading.Event()

        async def ask(service):
            streams = [
                service.submit([lambda llm: (go.wait(20), "a")[1]], SamplingParams())
                for _ in range(2)
            ]
            service.stop()
            go.set()
            for one in streams:
                with pytest.raises(ServiceStopped):
                    await asyncio.wait_for(one.next(), 10)

        with running() as service:
            asyncio.run(ask(service))

    @pytest.mark.parametrize("error", [ValueError("too long"), KeyError("too long")])
    def test_refused(self, error):
        def fail(llm):
            raise error

        async def ask(service):
            with pytest.raises(ValueError, match="too long"):
                await service.submit([fail], SamplingParams()).next()
            with pytest.raises(ValueError, match="too long"):
                await service.tokenize(fail, 1)

        with running() as service:
            asyncio.run(ask(service))
