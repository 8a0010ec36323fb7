"""The end of the model and of the server: every client hears of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import OpenAI

from absorbed_mla.serving.server import http_server
from tests.support.llm import serving, until

REASON = "the model has stopped: rank 1 has ended"


@pytest.fixture
def served():
    with serving() as made:
        yield made


def ask(served, stream: bool, prompt="some text") -> str:
    """The error that a client gets."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        try:
            answer = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=400, stream=stream
            )
            if stream:
                for _ in answer:
                    pass
            return ""
        except openai.APIStatusError as error:
            assert error.status_code == 503 and error.body["type"] == "server_error"
            return error.body["message"]
        except openai.APIError as error:
            # Of an event in the middle of a stream.
            assert stream and error.body["code"] == 503
            return error.message


def health(served) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"{served.url}/health") as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


class TestDeath:
    @pytest.mark.parametrize("while_stepping", [True, False])
    def test_every_client_gets_an_error(self, served, while_stepping):
        """Those that wait for a token, those that wait for a step, and those that come later."""
        served.runner.step_seconds = 0.01
        with ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(ask, served, number % 2 == 0) for number in range(8)]
            assert served.runner.started.wait(10)
            until(lambda: served.runner.num_added == 8)
            served.runner.go.clear()
            if not while_stepping:
                # These are in the queue when the step raises.
                waiting += [pool.submit(ask, served, number % 2 == 0) for number in range(8)]
            served.runner.error = RuntimeError("rank 1 has ended")
            served.runner.go.set()
            assert [one.result(20) for one in waiting] == [REASON] * len(waiting)
        assert [ask(served, stream) for stream in (False, True)] == [REASON] * 2
        assert health(served) == (503, {"status": "stopped"})
        assert served.deaths == ["died"]

    def test_while_nothing_runs(self, served, monkeypatch):
        """It is seen without a request."""
        served.runner.dead = RuntimeError("rank 1 has ended")
        until(lambda: served.deaths)
        assert health(served)[0] == 503
        assert ask(served, stream=False) == REASON
        assert served.deaths == ["died"]


class TestShutdown:
    """Answers may end; what is left gets an error."""

    def shut_down(self, served, seconds_per_step: float) -> list[str]:
        """What a streaming and a waiting client get, whose answers have 400 steps."""
        served.runner.step_seconds = seconds_per_step
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(ask, served, stream) for stream in (True, False)]
            until(lambda: served.runner.num_added == 2)
            served.http.should_exit = True
            return [one.result(20) for one in waiting]

    @pytest.mark.parametrize(
        ("grace", "seconds_per_step", "answer"),
        [
            # Enough for 400 steps on a busy machine.
            pytest.param(15, 0.0002, "", id="short"),
            pytest.param(0.5, 0.05, "the server is shutting down", id="long"),
        ],
    )
    def test_answers(self, monkeypatch, request, grace, seconds_per_step, answer):
        monkeypatch.setattr(http_server, "_GRACE", grace)
        served = request.getfixturevalue("served")
        assert self.shut_down(served, seconds_per_step) == [answer] * 2
        assert served.deaths == []
