"""Many clients at once, those that go away, and those that do not read."""

import asyncio
import http.client
import json
import socket
import time

import pytest
from openai import AsyncOpenAI, OpenAI
from starlette.requests import ClientDisconnect

from absorbed_mla.serving.server.app import _write
from tests.support.llm import expected_text, until

ROUTES = {
    "/v1/completions": {"prompt": "some text"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "some text"}]},
}


def open_request(served, path="/v1/completions", body=None, receive_bytes=None, **fields):
    """A connection that has sent a request, and read nothing."""
    content = json.dumps({**(body or ROUTES[path]), **fields}).encode()
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", served.port))
    lines = ("host: x", "content-type: application/json", f"content-length: {len(content)}")
    head = "\r\n".join((f"POST {path} HTTP/1.1", *lines, "", ""))
    raw.sendall(head.encode() + content)
    return raw


def completed(served, **fields):
    """The JSON of a whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    kind = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(fields), kind)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_64_clients(served):
    """Streamed and not, each its own text."""
    served.runner.step_seconds = 0.002

    async def one(client, number: int) -> None:
        prompt, tokens = f"client {number} " * (1 + number % 3), 5 + number
        expected = expected_text(prompt, tokens=tokens)
        ask = {"model": "tiny", "prompt": prompt, "max_tokens": tokens}
        if number % 2:
            stream = await client.completions.create(**ask, stream=True)
            text = "".join([piece.choices[0].text async for piece in stream])
        else:
            text = (await client.completions.create(**ask)).choices[0].text
        assert text == expected

    async def everyone() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            await asyncio.gather(*(one(client, number) for number in range(64)))

    asyncio.run(everyone())
    served.runner.require_no_leak()


class TestGoingAway:
    """Outputs that nobody will read are not generated."""

    @pytest.fixture(autouse=True)
    def slowly(self, served):
        served.runner.step_seconds = 0.01

    def require_aborted(self, served, outputs: int) -> None:
        until(lambda: len(served.runner.aborted) == outputs)
        served.runner.require_no_leak()
        # And nobody else is affected.
        found = completed(served, prompt="abc", max_tokens=3)
        assert found["choices"][0]["text"] == "cba"
        assert len(served.runner.aborted) == outputs

    @pytest.mark.parametrize("path", ROUTES)
    def test_not_streamed(self, served, path):
        raw = open_request(served, path, max_tokens=400, n=2)
        assert served.runner.started.wait(10)
        raw.close()
        self.require_aborted(served, 2)

    @pytest.mark.parametrize("path", [*ROUTES, None])
    def test_streamed(self, served, path):
        """Also several prompts at once."""
        several = {"path": path} if path else {"body": {"prompt": ["first", "second", "third"]}}
        raw = open_request(served, **several, max_tokens=400, stream=True)
        assert raw.recv(10_000).startswith(b"HTTP/1.1 200")
        raw.close()
        self.require_aborted(served, 1 if path else 3)

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token(self, served, stream):
        served.runner.go.clear()
        raw = open_request(served, max_tokens=400, stream=stream)
        assert served.runner.started.wait(10)
        raw.close()
        time.sleep(0.1)
        served.runner.go.set()
        until(lambda: len(served.runner.aborted) == 1)
        # Not when the head of the answer, or a first token, was to be sent.
        assert served.runner.num_steps <= 3

    def test_openai_stream_that_is_closed(self, served):
        with OpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            stream = client.completions.create(
                model="tiny", prompt="text", max_tokens=400, stream=True
            )
            assert next(iter(stream)).choices[0].text
            stream.close()
            self.require_aborted(served, 1)


class TestSlowReader:
    @pytest.fixture(autouse=True)
    def small_buffers(self, served):
        """So that a stream waits for its reader soon; connections inherit it."""
        [listening] = served.http.servers[0].sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def test_others_are_not_delayed(self, served):
        """Twenty streams that nobody reads: the model goes on, and answers the others."""
        ask = {"max_tokens": 480, "n": 4, "stream": True}
        slow = [open_request(served, receive_bytes=4096, **ask) for _ in range(20)]
        try:
            until(lambda: served.runner.num_added == 20 * 4)
            for _ in range(5):
                begin = time.monotonic()
                found = completed(served, prompt="abc", max_tokens=3)
                assert found["choices"][0]["text"] == "cba"
                assert time.monotonic() - begin < 5
            # Their outputs end without a reader.
            until(lambda: not served.runner.has_running())
        finally:
            for raw in slow:
                raw.close()
        assert not served.runner.aborted

    def test_gets_everything_later(self, served):
        """What was not read is one piece afterwards, not one per token."""
        ask = {"max_tokens": 400, "n": 16, "stream": True}
        served.runner.step_seconds = 0.001
        raw = open_request(served, receive_bytes=4096, **ask)
        until(lambda: served.runner.num_added and not served.runner.has_running(), 20)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += raw.recv(1 << 20)
        raw.close()
        texts: dict[int, str] = {}
        events = [line[6:] for line in received.split(b"\n") if line.startswith(b"data: {")]
        for event in events:
            [choice] = json.loads(event)["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        assert texts == {i: expected_text("some text", i, 400) for i in range(16)}
        assert len(events) < 16 * 400 / 4


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_connection_that_was_lost(error):
    """As if the client had said so: uvloop raises a RuntimeError."""

    async def send(message):
        raise error("the handler is closed")

    with pytest.raises(ClientDisconnect):
        asyncio.run(_write(send, {"type": "http.response.body"}))
