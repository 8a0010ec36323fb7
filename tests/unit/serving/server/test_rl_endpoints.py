"""Endpoints for trainers, around a fake model; ``test_update_weights.py`` has a real one."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from absorbed_mla.serving.executor.weight_updates import UpdateFailure
from tests.support.llm import expected_text, serving, until
from tests.unit.serving.server.test_refusals import COMPLETIONS, require_error, send

RL = {"enable_rl_endpoints": True}
ADDRESS = "tcp://127.0.0.1:1"


@pytest.fixture
def served():
    with serving(app_options=RL) as made:
        yield made


def post(served, path: str, body=b""):
    return send(served, "POST", path, body)


def get(served, path: str):
    return send(served, "GET", path)[1]


def complete(served, prompt="abc", tokens=16):
    """Text and reason of its end, or status and error."""
    status, body = post(served, COMPLETIONS, {"prompt": prompt, "max_tokens": tokens})
    if status != 200:
        return status, body
    return body["choices"][0]["text"], body["choices"][0]["finish_reason"]


def test_off_and_guarded():
    """Without the option there are none; with a key they ask for it, and no page may use them."""
    posts = ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "update_weights")
    paths = [("POST", f"/{name}") for name in posts] + [
        ("GET", "/is_paused"),
        ("GET", "/is_sleeping"),
    ]
    for options, status, headers in (
        ({}, 404, {}),
        (RL, 401, {}),
        (RL, 403, {"authorization": "Bearer key", "origin": "https://a.example"}),
    ):
        with serving("key", origins=["*"], app_options=options) as served:
            for method, path in paths:
                if method == "POST" or status != 403:
                    assert send(served, method, path, b"", headers)[0] == status, path
            assert not served.service.llm.is_sleeping and not served.runner.updates


REFUSED = [
    ("/sleep?level=3", b"", "level must be 0, 1 or 2, got 3"),
    ("/sleep?level=x", b"", "level: Input should be a valid integer"),
    ("/sleep?mode=keep", b"", "mode must be one of abort, wait, got 'keep'"),
    ("/pause?mode=now", b"", "mode must be one of abort, wait, keep, got 'now'"),
    ("/pause?cache=1", b"", "cache: Extra inputs are not permitted"),
    ("/wake_up?tags=weights&tags=all", b"", "tags must be some of weights, kv_cache"),
    ("/update_weights", {"address": ADDRESS, "timeout": 0}, "timeout above 0 and finite, got 1 an"),
    ("/update_weights", {"address": ADDRESS, "rank_offset": 0}, "rank_offset must be at least 1"),
    ("/update_weights", {"update_info": {}}, "address: Field required"),
    ("/update_weights", b"", "Invalid JSON"),
]


def test_refused(served):
    for path, body, text in REFUSED:
        require_error(post(served, path, body), 400, text)
    assert complete(served) == (expected_text("abc"), "length") and not served.runner.updates


class TestSleep:
    def test_requests_and_health(self, served):
        """What runs ends with what it has; what comes is refused, and the server is healthy."""
        served.runner.step_seconds = 0.01
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(complete, served, "abc", 400)
            assert served.runner.started.wait(10)
            assert post(served, "/sleep?level=1") == (200, {"is_sleeping": True})
            text, reason = running.result(10)
        assert reason == "abort" and expected_text("abc", tokens=400).startswith(text)
        require_error(complete(served), 503, "the model is asleep")
        assert send(served, "GET", "/health")[0] == 200
        require_error(post(served, "/reset_prefix_cache"), 409, "the model is asleep")
        assert post(served, "/wake_up?tags=weights")[1] == {"is_sleeping": True}
        assert post(served, "/wake_up")[1] == get(served, "/is_sleeping") == {"is_sleeping": False}
        assert get(served, "/is_paused") == {"is_paused": False}
        assert complete(served) == (expected_text("abc"), "length")

    def test_without_weights(self, served):
        assert post(served, "/sleep?level=2")[0] == 200
        require_error(post(served, "/wake_up"), 409, "has discarded the weights")
        assert post(served, "/update_weights", {"address": ADDRESS, "rank_offset": 3})[0] == 200
        assert served.runner.updates == [(ADDRESS, False, 3, 300.0)]
        assert post(served, "/wake_up")[0] == 200
        assert complete(served) == (expected_text("abc"), "length")

    def test_the_end_while_asleep(self, served):
        """The watchdog sees that processes have ended, as it does awake."""
        post(served, "/sleep")
        served.runner.dead = RuntimeError("rank 0 has ended")
        until(lambda: served.deaths)
        assert send(served, "GET", "/health")[0] == 503
        require_error(post(served, "/wake_up"), 503, "the model has stopped")


class TestPause:
    @pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
    def test_modes(self, served, mode):
        """Streams that run wait, end or are aborted; those that come wait for /resume."""
        served.runner.step_seconds = 0.005
        tokens, url = 60, f"{served.url}/v1"
        with OpenAI(base_url=url, api_key="any") as client, ThreadPoolExecutor(1) as pool:
            ask = {"model": "tiny", "prompt": "abc", "max_tokens": tokens, "stream": True}
            stream = client.completions.create(**ask)
            first = next(stream).choices[0].text
            assert post(served, f"/pause?mode={mode}") == (200, {"status": "paused"})
            assert get(served, "/is_paused") == {"is_paused": True}
            late = pool.submit(complete, served, "late")
            time.sleep(0.05)
            steps, ran = served.runner.num_steps, served.runner.has_running()
            time.sleep(0.05)
            assert served.runner.num_steps == steps and ran == (mode == "keep")
            assert not late.done() and served.service.health == "ok"
            assert post(served, "/resume") == (200, {"status": "resumed"})
            pieces = [piece.choices[0] for piece in stream]
            text = first + "".join(one.text for one in pieces)
            assert late.result(10) == (expected_text("late"), "length")
        assert pieces[-1].finish_reason == ("abort" if mode == "abort" else "length")
        assert expected_text("abc", tokens=tokens).startswith(text)
        assert (len(text) == tokens) == (mode != "abort")


def test_the_end(served):
    """Of a server that is healthy, though a request is held and an update waits for its sender."""
    post(served, "/pause")
    served.runner.go.clear()
    with ThreadPoolExecutor(2) as pool:
        held = pool.submit(complete, served)
        until(lambda: served.service._held)
        update = pool.submit(post, served, "/update_weights", {"address": ADDRESS})
        until(lambda: served.runner.updates)
        assert send(served, "GET", "/health")[0] == 200
        served.service.end()
        require_error(update.result(5), 503, "the server is shutting down")
        served.runner.go.set()
        require_error(held.result(5), 503, "the server is shutting down")


@pytest.mark.parametrize("changed", [False, True])
def test_an_update_that_fails(served, changed):
    """500; with some of the weights nothing is generated until another update."""
    served.runner.step_seconds = 0.005
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, served, "abc", 200)
        assert served.runner.started.wait(10)
        served.runner.failure = UpdateFailure("no connection", changed, False)
        found = post(served, "/update_weights", {"address": ADDRESS, "keep_cache": True})
        require_error(found, 500, "update_weights has failed: no connection")
        if changed:
            require_error(complete(served), 503, "the model lacks weights")
            served.runner.failure = None
            assert post(served, "/update_weights", {"address": ADDRESS})[0] == 200
        assert running.result(10) == (expected_text("abc", tokens=200), "length")
