"""A client of OpenAI's completions: many streamed requests at once, and when their tokens came.

Only the events of a stream are counted, nothing is parsed while tokens come: a client that is
slower than the server would be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TypeAlias

from benchmarks.served.burst import Burst, Timeline

_EVENT, _END = b"data: {", b"data: [DONE]"
_Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(port: int, model: str, burst: Burst, limit: float) -> dict[str, float | None]:
    """Figures of a burst, see ``Timeline``.

    The connections of the first requests stand when time begins, that of another one when it is
    sent.

    An event is one token, or several where the server has fallen behind: then a request's tokens
    after the first are divided among its events.

    Raises:
        RuntimeError: If a request is refused or breaks off.
        TimeoutError: After ``limit`` seconds.
    """
    return asyncio.run(asyncio.wait_for(_run(port, model, burst), limit))


async def _run(port: int, model: str, burst: Burst) -> dict[str, float | None]:
    outputs, timeline = burst.outputs(), Timeline(burst)
    messages = [_message(port, model, *one, burst) for one in zip(burst.prompts(), outputs)]
    waiting = iter(enumerate(messages))
    connections = [await _connect(port) for _ in range(burst.requests)]
    begin = time.perf_counter()

    async def client(connection: _Connection) -> None:
        for number, message in waiting:
            if connection[1].is_closing():
                connection = await _connect(port)
            timeline.sent[number] = time.perf_counter() - begin
            events = await _stream(*connection, message, begin)
            shares = token_shares([count for _, count in events], outputs[number])
            timeline.arrivals[number] = [(at, share) for (at, _), share in zip(events, shares)]

    await asyncio.gather(*map(client, connections))
    return timeline.figures()


async def _connect(port: int) -> _Connection:
    return await asyncio.open_connection("127.0.0.1", port)


def token_shares(counts: list[int], new_tokens: int) -> list[float]:
    """How many tokens came each time, by the numbers of events that came."""
    after_first = sum(counts) - 1
    if after_first <= 0:
        return [float(new_tokens)] * len(counts[:1])
    each = (new_tokens - 1) / after_first
    return [1 + (counts[0] - 1) * each, *(count * each for count in counts[1:])]


def _message(port: int, model: str, prompt: list[int], new_tokens: int, burst: Burst) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": new_tokens,
            "temperature": burst.temperature,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


async def _stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes, begin: float
) -> list[tuple[float, int]]:
    """Seconds since ``begin``, and the events that came then."""
    writer.write(message)
    found: list[tuple[float, int]] = []
    text = await reader.readuntil(b"\r\n\r\n")
    try:
        if b" 200 " not in text.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"a request was refused: {(text + await reader.read()).decode()}")
        while data := await reader.read(1 << 16):
            now = time.perf_counter() - begin
            # The end of what came before may be the beginning of an event.
            text = text[-len(_END) + 1 :] + data
            count = text.count(_EVENT) - text[: -len(data)].count(_EVENT)
            if count:
                found.append((now, count))
            if _END in text:
                return found
    finally:
        writer.close()
    raise RuntimeError(f"a stream broke off: {text.decode(errors='replace')}")
