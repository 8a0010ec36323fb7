"""What a client may send, and how slowly, before anybody looks at its key."""

import json
import re
import socket
import time

import pytest

from absorbed_mla.serving.server import limits, request_fields
from tests.support.llm import serving, until
from tests.unit.serving.server.test_refusals import COMPLETIONS, head, require_error, send

PARSERS = ["httptools", "h11"]


@pytest.fixture(params=PARSERS)
def served(request, monkeypatch):
    """Behind a key that no test knows, with each of the two parsers of HTTP."""
    monkeypatch.setattr(limits, "_SECONDS", 0.5)
    monkeypatch.setattr(limits, "_BYTES_PER_SECOND", 1 << 10)
    if request.param == "h11":
        monkeypatch.setattr(limits, "HttpToolsProtocol", None)
    elif limits.HttpToolsProtocol is None:
        pytest.skip("needs httptools")
    with serving(api_key="secret", http_options={"max_body_bytes": 1 << 20}) as made:
        yield made
        assert made.service.is_alive


def connected(served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=10)


def answer_of(raw: socket.socket) -> bytes:
    """All that comes until the server closes the connection; what it had not read resets it."""
    found = b""
    try:
        while piece := raw.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def sent_until_refused(raw: socket.socket, piece: bytes, most: int) -> int:
    """Bytes that could be sent, up to ``most``."""
    sent = 0
    try:
        while sent < most:
            raw.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


LINE = b"x-long: " + b"a" * 1000 + b"\r\n"
BODY = b"transfer-encoding: chunked\r\n\r\n"


class TestEndless:
    @pytest.mark.parametrize(
        ("begin", "piece"),
        [
            pytest.param(b"POST /", b"a" * 1000, id="address"),
            pytest.param(b"POST / HTTP/1.1\r\n", LINE * 100, id="headers"),
            pytest.param(b"POST / HTTP/1.1\r\nx: ", b"a" * 100_000, id="header"),
            pytest.param(b"POST / HTTP/1.1\r\n" + BODY + b"0\r\n", LINE * 100, id="trailers"),
            pytest.param(
                b"POST / HTTP/1.1\r\n" + BODY + b"1;a=", b"a" * 100_000, id="chunk's extension"
            ),
        ],
    )
    def test_head(self, served, begin, piece):
        """The buffers of two sockets take a few megabytes, of a server that reads no more."""
        with connected(served) as raw:
            raw.sendall(begin)
            assert sent_until_refused(raw, piece, 64 << 20) < 32 << 20
        # Of httptools; h11 has an answer of its own. The application may be first with its 404,
        # where the request's head is whole.
        if limits.HttpToolsProtocol is not None:
            counted = served.http.config.app.state.metrics.text().decode()
            status = "(431|404)" if BODY in begin else "431"
            assert re.search(rf'status="{status}"[^\n]* 1\.0', counted)
        assert send(served, "GET", "/health")[0] == 200

    def test_body_that_nobody_reads(self, served):
        """After the 401 it is thrown away, up to twice the largest body."""
        with connected(served) as raw:
            raw.sendall(head(COMPLETIONS, f"content-length: {1 << 40}"))
            assert sent_until_refused(raw, b"a" * 100_000, 64 << 20) < 32 << 20

    def test_usual_lengths(self, served):
        """Long cookies, and a body that comes in small chunks."""
        chunk = b"10\r\n" + b" " * 16 + b"\r\n"
        with connected(served) as raw:
            key = "authorization: Bearer secret"
            raw.sendall(head(COMPLETIONS, key, "cookie: " + "a" * 30_000, BODY.decode().strip()))
            raw.sendall(chunk * 20_000 + b"E\r\n" + b'{"prompt":"a"}' + b"\r\n0\r\n\r\n")
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")


class TestSlow:
    @pytest.mark.parametrize(
        ("begin", "status"),
        [
            pytest.param(b"", b"", id="silent"),
            pytest.param(b"POST / HTTP/1.1\r\nhost: ", b"HTTP/1.1 408", id="head"),
            pytest.param(
                head(COMPLETIONS, "authorization: Bearer secret", "content-length: 9") + b"{",
                b"HTTP/1.1 408",
                id="body",
            ),
        ],
    )
    def test_refused(self, served, begin, status):
        with connected(served) as raw:
            raw.sendall(begin)
            answer = answer_of(raw)
        assert answer.startswith(status) and bool(answer) == bool(status)
        if status:
            body = json.loads(answer.partition(b"\r\n\r\n")[2])
            require_error((408, body), 408, "the request came too slowly")

    def test_next_request_of_a_connection(self, served):
        """uvicorn forgets its own time-out at its first byte."""
        with connected(served) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            until(lambda: raw.recv(1 << 16).endswith(b"}"))
            raw.sendall(b"GET /health HTTP/1.1\r\n")
            assert answer_of(raw).startswith(b"HTTP/1.1 408")

    def test_what_comes_steadily(self, served):
        """A second more for each kilobyte, here."""
        content = b'{"prompt": "a"' + b" " * 2000
        with connected(served) as raw:
            length = f"content-length: {len(content) + 1}"
            raw.sendall(head(COMPLETIONS, "authorization: Bearer secret", length) + content)
            time.sleep(1.0)
            raw.sendall(b"}")
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")

    def test_long_answer(self, served):
        """The time is that of the request, not of its answer."""
        served.runner.step_seconds = 0.1
        body, key = {"prompt": "a", "max_tokens": 12}, {"authorization": "Bearer secret"}
        assert send(served, "POST", COMPLETIONS, body, key)[0] == 200


def test_many_connections(served, monkeypatch):
    """Of those that have not sent a request, the oldest make room."""
    monkeypatch.setattr(limits, "_MOST_ARRIVING", 3)
    several = [connected(served) for _ in range(3)]
    time.sleep(0.1)
    assert send(served, "GET", "/health")[0] == 200
    assert answer_of(several[0]) == b""
    for one in several[1:]:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer_of(one).startswith(b"HTTP/1.1 200")


class TestParts:
    """Bodies that would keep Python busy for seconds."""

    MANY = 200_000
    TOO_MANY = "must have at most 32768 strings, lists and objects together, and 1048576 numbers"

    @pytest.fixture(scope="class")
    def served(self):
        with serving() as made:
            yield made

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param({f"x{i}": 1 for i in range(MANY)}, id="fields"),
            pytest.param({"prompt": [[1]] * MANY}, id="lists"),
            pytest.param({"messages": [{}] * MANY}, id="objects"),
            pytest.param({"prompt": ["\\"] * MANY}, id="strings"),
            pytest.param({"prompt": [1] * 1_100_000}, id="numbers"),
        ],
    )
    def test_refused(self, served, body):
        require_error(send(served, "POST", COMPLETIONS, body), 413, self.TOO_MANY)

    @pytest.mark.parametrize("text", ['[{"\\', '"', "\\", ",[{"])
    def test_text_has_no_parts(self, served, text):
        """Whatever is in it."""
        found = send(served, "POST", COMPLETIONS, {"prompt": text * self.MANY})
        require_error(found, 400, f"the prompt has {len(text) * self.MANY}")

    def test_first_of_many_errors(self, served):
        """One of a list is enough, and ten of all."""
        found = send(served, "POST", COMPLETIONS, {"prompt": "a", "stop_token_ids": ["a"] * 20_000})
        require_error(found, 400, "stop_token_ids.0: Input should be a valid integer")
        assert found[1]["error"]["message"].count("valid integer") == 1
        found = send(served, "POST", COMPLETIONS, {f"x{i}": 1 for i in range(1000)})
        assert found[1]["error"]["message"].count("x") < 30


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_content_type(kind):
    """A web page may send these to any server without asking; and what has no type."""
    with serving() as served, connected(served) as raw:
        line = [] if kind is None else [f"content-type: {kind}"]
        lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: x", *line, "content-length: 14", "", ""]
        raw.sendall("\r\n".join(lines).encode() + b'{"prompt":"a"}')
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 415")
        for good in ("application/json", "Application/JSON; charset=utf-8", "application/x+json"):
            headers = {"content-type": good}
            assert send(served, "POST", COMPLETIONS, {"prompt": "a"}, headers)[0] == 200
        headers = {"content-encoding": "gzip"}
        found = send(served, "POST", COMPLETIONS, {"prompt": "a"}, headers)
        require_error(found, 415, "Content-Encoding must be identity, got 'gzip'")


@pytest.mark.parametrize("cut", [40, 90, 1000])
def test_upgrades_are_ignored(served, cut):
    """Java's client asks for HTTP/2 with its first body; wherever that comes in two pieces."""
    asks = ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAM"]
    content = b'{"prompt": "hello", "max_tokens": 2}'
    asks += ["authorization: Bearer secret", f"content-length: {len(content)}"]
    request = head(COMPLETIONS, *asks) + content
    with connected(served) as raw:
        for _ in range(2):
            for piece in (request[:cut], request[cut:]):
                raw.sendall(piece)
                time.sleep(0.02)
            answer = raw.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200") and b'"text":"ol"' in answer
        raw.sendall(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 40" in answer_of(raw)


def test_large_bodies_are_paced(monkeypatch):
    """All of them together, beyond what is free for each and a burst; none is refused for it."""
    monkeypatch.setattr(request_fields, "_BYTES_OF_ALL", 1 << 20)
    monkeypatch.setattr(request_fields, "_BURST_SECONDS", 0.0)
    content = b'{"prompt": "a"}' + b" " * (1 << 19)
    with serving() as served:
        for size, least in ((1 << 15, 0.0), (1 << 19, 0.4)):
            began = time.monotonic()
            assert send(served, "POST", COMPLETIONS, content[:size])[0] == 200
            assert (time.monotonic() - began >= least) if least else True
