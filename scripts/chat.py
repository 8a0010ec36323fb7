#!/usr/bin/env python3
"""Talk to a model that absorbed-mla-serve serves, with OpenAI's own client.

    $ absorbed-mla-serve DeepSeek-V2-Lite
    $ python scripts/chat.py --system "Answer in one sentence."

Every line of stdin is a message; the answer appears as it is generated. --complete continues each
line instead, for models without a chat template.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from absorbed_mla.serving.option_flags import add_flags
from absorbed_mla.serving.sampling.parameters import SamplingParams
from console.parser import Parser
from console.script import leave, run_script


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser("chat.py", __doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="of the server")
    add("--api-key", default="none", help="if the server asks for one")
    add("--system", help="message that every conversation begins with")
    add("--complete", action="store_true", help="continue each line, without a chat template")
    add_flags(
        parser,
        SamplingParams,
        ["max_tokens", "temperature"],
        max_tokens={"default": 256, "help": "of an answer"},
        temperature={"default": 0.7},
    )
    return parser.parse_args(argv)


def talk(args: argparse.Namespace) -> None:
    """Answer every line of stdin.

    Raises:
        ValueError: If the client is missing, or the server refuses a request.
    """
    try:
        import openai
    except ImportError as error:
        raise ValueError("openai is missing: pip install openai") from error
    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    history = [{"role": "system", "content": args.system}] if args.system else []
    try:
        model = client.models.list().data[0].id
        sampling = {"model": model, "max_tokens": args.max_tokens, "stream": True}
        sampling["temperature"] = args.temperature
        for line in sys.stdin:
            prompt = line.rstrip("\n")
            if args.complete:
                events = client.completions.create(prompt=prompt, **sampling)
                _show(event.choices[0].text for event in events)
            else:
                history.append({"role": "user", "content": prompt})
                events = client.chat.completions.create(messages=history, **sampling)
                text = _show(event.choices[0].delta.content or "" for event in events)
                history.append({"role": "assistant", "content": text})
    except openai.OpenAIError as error:
        raise ValueError(f"{args.url}: {error}") from error


def _show(pieces: Iterable[str]) -> str:
    """Print pieces of a text as they come; returns all of it."""
    text = ""
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text


if __name__ == "__main__":
    arguments = sys.argv[1:]
    leave(run_script("chat.py", lambda: talk(parse_arguments(arguments))))
