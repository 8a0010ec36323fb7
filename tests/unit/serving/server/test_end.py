"""The end of the model and of the server: every client hears of it."""

import json
import socket
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import OpenAI

from tests.support.llm import serving, until
from tests.unit.serving.server.test_refusals import head

REASON = "the model has stopped"


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

    def test_reason_is_for_the_operator(self, served, caplog):
        """It may name folders, and lines of a process's log."""
        served.runner.error = RuntimeError("rank 1 has ended; its last lines: /secret/path")
        assert ask(served, stream=False) == REASON
        [record] = [one for one in caplog.records if one.levelname == "CRITICAL"]
        assert record.getMessage() == f"{REASON}: {served.runner.error}"

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
    def test_answers(self, grace, seconds_per_step, answer):
        with serving(http_options={"shutdown_timeout": grace}) as served:
            assert self.shut_down(served, seconds_per_step) == [answer] * 2
            assert served.deaths == []

    def test_new_connections(self, served):
        """Until what runs has ended, they hear that they come too late; then there is no server."""
        served.runner.step_seconds = 0.002
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, served, False)
            until(lambda: served.runner.num_added == 1)
            served.http.should_exit = True
            until(lambda: served.service.health == "draining")
            assert health(served) == (503, {"status": "draining"})
            with pytest.raises(urllib.error.HTTPError, match="503") as refused:
                content, kind = b'{"prompt": "a"}', {"content-type": "application/json"}
                url = f"{served.url}/v1/completions"
                urllib.request.urlopen(urllib.request.Request(url, content, kind))
            assert refused.value.headers["retry-after"] == "1"
            assert "shutting down" in json.loads(refused.value.read())["error"]["message"]
            assert running.result(20) == "" and served.runner.num_added == 1
        with pytest.raises(OSError):
            until(lambda: health(served) and False)

    def test_new_requests(self, served):
        """Those whose heads had come are refused, while those that ran before go on."""
        served.runner.step_seconds = 0.002
        with (
            ThreadPoolExecutor(1) as pool,
            socket.create_connection(("127.0.0.1", served.port)) as raw,
        ):
            running = pool.submit(ask, served, False)
            until(lambda: served.runner.num_added == 1)
            body = b'{"prompt": "a"}'
            raw.sendall(head("/v1/completions", f"content-length: {len(body)}") + body[:1])
            until(lambda: len(served.http.server_state.tasks) == 2)
            served.http.should_exit = True
            until(lambda: served.service.health == "draining")
            raw.sendall(body[1:])
            answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))
            assert answer.startswith(b"HTTP/1.1 503") and b"the server is shutting down" in answer
            assert running.result(20) == ""


def test_silent_process():
    """Its heartbeat stays out, whether or not a step runs; a long step alone is no alarm."""
    with serving(step_timeout=60) as served, ThreadPoolExecutor(1) as pool:
        served.runner.go.clear()
        running = pool.submit(ask, served, False)
        assert served.runner.started.wait(10)
        for silent, status in ((1.5, "ok"), (21, "hung"), (0.5, "ok")):
            served.runner.silent = silent
            assert health(served) == (200 if status == "ok" else 503, {"status": status})
        served.runner.go.set()
        assert running.result(20) == ""


def test_hung_step():
    """A rank that does not answer is no process that has ended: nothing else notices it."""
    with serving(step_timeout=0.2) as served, ThreadPoolExecutor(1) as pool:
        served.runner.go.clear()
        running = pool.submit(ask, served, False)
        until(lambda: health(served) == (503, {"status": "hung"}))
        served.runner.go.set()
        assert running.result(20) == "" and health(served) == (200, {"status": "ok"})
