"""Clients of a server as users are: more and fewer of them, some that leave or ask wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from openai import APIError, AsyncOpenAI

# Clients at once, in equal parts of the time.
_CLIENTS = (2, 6, 12, 20, 6, 2)
# Tokens of the beginning that half of the prompts share, of what follows, and of outputs.
_SHARED, _OWN, _OUTPUT = 128, (10, 200), (10, 60)
# Shares of requests whose clients leave, and that are refused.
_LEAVE, _WRONG = 0.05, 0.03
# Token ids that any vocabulary has.
_IDS = range(3, 250)


async def run(url: str, api_key: str, seconds: float, seed: int = 0) -> None:
    """Send requests for some time, until those that run then have ended.

    Args:
        url: Of the server, without ``/v1``.
        api_key: Of the server.
        seconds: For which requests begin.
        seed: Of prompts, lengths and decisions.
    """
    drawn = random.Random(seed)
    shared = drawn.choices(_IDS, k=_SHARED)
    begin, tasks = time.monotonic(), []
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        while (passed := time.monotonic() - begin) < seconds:
            tasks = [one for one in tasks if not one.done()]
            if len(tasks) < _CLIENTS[int(passed / seconds * len(_CLIENTS))]:
                tasks.append(asyncio.create_task(_ask(client, model, shared, drawn)))
            # Requests come one after the other, not all at once.
            await asyncio.sleep(0.03)
        await asyncio.gather(*tasks)


async def _ask(client: AsyncOpenAI, model: str, shared: list[int], drawn: random.Random) -> None:
    prompt = drawn.choices(_IDS, k=drawn.randint(*_OWN))
    prompt = shared + prompt if drawn.random() < 0.5 else prompt
    outputs, kind = drawn.randint(*_OUTPUT), drawn.random()
    if kind < _WRONG:
        prompt = [-1]
    with contextlib.suppress(APIError):
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=outputs,
            stream=True,
            extra_body={"ignore_eos": drawn.random() < 0.7},
        )
        async for _ in stream:
            if _WRONG <= kind < _WRONG + _LEAVE:
                await stream.close()
                return
