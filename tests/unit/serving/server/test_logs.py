"""The server's log as JSON."""

import contextlib
import json
import logging
import logging.config
import time
import urllib.error
import urllib.request

import pytest

from absorbed_mla.serving.server.logs import JsonLines, log_config
from tests.support.llm import serving, until
from tests.unit.serving.server.test_clients import open_request
from tests.unit.serving.server.test_refusals import COMPLETIONS, send


def test_of_a_request(capsys):
    """What is said of it has fields of its own."""
    with serving(http_options={"log_format": "json"}) as served:
        urllib.request.urlopen(f"{served.url}/health?a=\N{SNOWMAN}".replace("\N{SNOWMAN}", "%E2"))
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in (shown.out + shown.err).splitlines()]
    [access] = [one for one in lines if one["logger"] == "uvicorn.access"]
    assert access["client"].startswith("127.0.0.1:") and access["level"] == "info"
    assert (access["method"], access["path"], access["status"]) == ("GET", "/health?a=%E2", 200)
    assert access["time"].endswith("+00:00") and "GET /health" in access["message"]


SECRET, KEY = "nobody may read this", "the-key"
FIELDS = {
    "endpoint": "/v1/completions",
    "model": "model",
    "prompt_tokens": 2 * len(SECRET),
    "cached_tokens": 0,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"max_tokens": 3}, {"completion_tokens": 6, **FIELDS}, id="whole"),
        pytest.param({"stream": True, "max_tokens": 3}, {"completion_tokens": 6}, id="streamed"),
        pytest.param({"stop": "i", "max_tokens": 3}, {"finish_reason": "stop"}, id="stop"),
        pytest.param({"prompt": [300]}, {"finish_reason": "error", "status": 400}, id="refused"),
        pytest.param({"request_id": "!" * 200}, {"request_id": "!" * 200}, id="named"),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_of_a_finished_request(capsys, form, fields, expected):
    """Its numbers, and nothing of its text and its key."""
    with serving(api_key=KEY, http_options={"log_format": form}) as served:
        body = {"prompt": [SECRET, SECRET], "n": 1, **fields}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        url = f"{served.url}/v1/completions"
        with contextlib.suppress(urllib.error.HTTPError):
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            urllib.request.urlopen(request).read()
    shown = "".join(capsys.readouterr())
    assert SECRET not in shown and SECRET[::-1][:3] not in shown and KEY not in shown
    lines = [line for line in shown.splitlines() if " /v1/completions " in line and "ttft" in line]
    if form == "text":
        [line] = lines
        assert line.startswith("INFO:     request '") and line.count("seconds: queue") == 1
        return
    # Nothing else is among them.
    [found] = [one for one in map(json.loads, shown.splitlines()) if "prompt_tokens" in one]
    expected = {"status": 200, "finish_reason": "length", **expected}
    assert {name: found[name] for name in expected} == expected
    if found["status"] == 200:
        assert 0 <= found["queue_seconds"] <= found["ttft_seconds"] <= found["total_seconds"] < 5


def test_of_clients_that_leave(capsys):
    with serving(http_options={"log_format": "json"}) as served:
        served.runner.step_seconds = 0.01
        for stream in (False, True):
            raw = open_request(served, max_tokens=400, stream=stream)
            until(lambda: served.runner.has_running())
            time.sleep(0.1)
            raw.close()
            until(lambda: not served.runner.has_running())
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    found = [one for one in found if "prompt_tokens" in one]
    ends = [(one["status"], one["finish_reason"]) for one in found]
    assert ends == [(499, "abort"), (200, "abort")]
    assert all(0 < one["completion_tokens"] < 400 for one in found)


def test_without_lines_of_requests(capsys):
    with serving(http_options={"access_log": False}) as served:
        send(served, "POST", COMPLETIONS, {"prompt": "a"})
    assert "/v1/completions" not in "".join(capsys.readouterr())


def test_errors():
    """With the lines of the traceback in one."""
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        kind = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "file", 1, "failed: %s", ("é",), kind)
    text = JsonLines().format(record)
    found = json.loads(text)
    assert "\n" not in text and found["message"] == "failed: é"
    assert found["error"].endswith("ValueError: a\nb")


def test_other_loggers():
    """Such as that which says why the model has died."""
    assert "root" in log_config("json") and "root" not in log_config("text")
