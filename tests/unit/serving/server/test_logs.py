"""The server's log as JSON."""

from __future__ import annotations

import json
import logging
import logging.config
import urllib.request

from absorbed_mla.serving.server.logs import JsonLines, log_config
from tests.support.llm import serving


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
