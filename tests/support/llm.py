"""``LLM`` without a model, and the server around it."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from absorbed_mla import LLM, SamplingParams
from absorbed_mla.serving.engine_options import EngineOptions
from absorbed_mla.serving.executor.commands import Abort, Add, Command
from absorbed_mla.serving.executor.weight_updates import UpdateFailure
from absorbed_mla.serving.llm_engine import LLMEngine
from absorbed_mla.serving.request_results import Progress, Result
from absorbed_mla.serving.statistics import Statistics
from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, Tokenizer
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face

if TYPE_CHECKING:
    from absorbed_mla.serving.server.http_server import HTTPServer
    from absorbed_mla.serving.server.service import Service

MAX_MODEL_LEN = 512
# The model fails at prompts with this one's first byte, after the tokens that each of them wants
# before. It is above 200, so prompts of random tokens below that do not have it.
FAILING_PROMPT = "€no"
FAILING = FAILING_PROMPT.encode()[0]
FAILURE = "the model's logits are NaN"
# Of every token, and of the next one in the order of the bytes; of a prompt's token, by its place.
LOGPROB, SECOND = -0.25, -1.5
PROMPT_LOGPROBS = [-0.5 - place / 64 for place in range(MAX_MODEL_LEN)]


def expected_text(prompt: str, index: int = 0, tokens: int = 16) -> str:
    """What the fake model says: the prompt backwards, again and again, from ``index`` on."""
    backwards = prompt[::-1]
    return "".join(backwards[(index + k) % len(prompt)] for k in range(tokens))


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template, which refuses a system's message as templates do."""

    def chat(self, messages, **options):
        if messages[0]["role"] == "system":
            raise KeyError("only users")
        return self.encode("".join(f"{one['role']}:{one['content']};" for one in messages))


@dataclass
class _Running:
    prompt: Sequence[int]
    params: SamplingParams
    index: int
    tokens: list[int]
    first_scheduled: float | None = None


class FakeRunner:
    """A runner whose tokens are those of :func:`expected_text`, one per request and step.

    Attributes:
        go: Steps wait for it.
        error: That the next step raises.
        dead: That the next check raises.
        silent: Seconds without a heartbeat.
        step_seconds: Of a step.
        tokens_before_failure: Of prompts with ``FAILING``.
        log_prob: Of every token.
        aborted: Numbers of requests that were aborted.
        started: Set by the first step.
        num_steps: That have begun.
        num_added: Requests, since it slept.
        says: What every output says, to its end, in place of its own.
        salts, priorities: ``cache_salt`` and ``priority`` of each request.
        updates: Arguments of each update of weights.
        failure: Of each update.
    """

    def __init__(self, **options) -> None:
        self._options = options
        self.go = threading.Event()
        self.go.set()
        self.num_steps = 0
        self.started = threading.Event()
        self.error: Exception | None = None
        self.dead: Exception | None = None
        self.silent = 0.0
        self.step_seconds = 0.0
        self.tokens_before_failure = 2
        self.log_prob = LOGPROB
        self.aborted: list[int] = []
        self._running: dict[int, _Running] = {}
        self.num_added = 0
        self.says: str | None = None
        self.salts: list[str | None] = []
        self.priorities: list[int] = []
        self.updates: list[tuple] = []
        self.failure: UpdateFailure | None = None

    def step(self, commands: Sequence[Command]) -> list[Progress]:
        self.started.set()
        self.num_steps += 1
        time.sleep(self.step_seconds)
        self.go.wait()
        if self.error is not None:
            raise self.error
        ended = []
        for command in commands:
            if isinstance(command, Add):
                # Outputs of one prompt come together; index by what is there.
                index = sum(one.prompt is command.prompt for one in self._running.values())
                running = _Running(command.prompt, command.params, index, [])
                self._running[self.num_added] = running
                self.salts.append(command.cache_salt)
                self.priorities.append(command.priority)
                self.num_added += 1
            elif isinstance(command, Abort) and command.number in self._running:
                self.aborted.append(command.number)
                del self._running[command.number]
                ended.append(Progress(command.number, [], result=Result(finish="abort")))
        return ended + [self._advance(number) for number in list(self._running)]

    def has_running(self) -> bool:
        return bool(self._running)

    def _advance(self, number: int) -> Progress:
        one = self._running[number]
        if FAILING in one.prompt and len(one.tokens) == self.tokens_before_failure:
            del self._running[number]
            failed = Result(one.tokens, finish="error", error=FAILURE)
            return Progress(number, [], result=failed)
        start = None if one.tokens else (time.time(), len(one.prompt) // 64 * 64)
        one.first_scheduled = one.first_scheduled or start[0]
        place = (one.index + len(one.tokens)) % len(one.prompt)
        token = one.prompt[len(one.prompt) - 1 - place]
        if self.says is not None:
            token = [*self.says.encode(), 256][len(one.tokens)]
        one.tokens.append(token)
        room = MAX_MODEL_LEN - len(one.prompt)
        stops = token in one.params.stop_token_ids
        result = None
        if stops or len(one.tokens) >= min(one.params.max_tokens or room, room):
            result = Result(one.tokens, finish="stop" if stops else "length")
            result.first_scheduled = one.first_scheduled
            result.num_cached_tokens = len(one.prompt) // 64 * 64
            if one.params.prompt_logprobs is not None:
                result.prompt_log_probs = PROMPT_LOGPROBS[1 : len(one.prompt)]
                result.prompt_top_log_probs = [{ord("z"): -0.125} for _ in one.prompt[1:]]
            del self._running[number]
        top = {token: self.log_prob, (token + 1) % 256: SECOND}
        return Progress(number, [token], [self.log_prob], [top], result, start)

    def options(self) -> EngineOptions:
        return EngineOptions(
            max_sequence_length=MAX_MODEL_LEN,
            max_requests=1024,
            cache_tokens=1024 * MAX_MODEL_LEN,
            vocab_size=257,
            **self._options,
        )

    def sleep(self, level: int = 1) -> None:
        self._running.clear()
        self.num_added = 0

    def wake(self) -> None:
        pass

    def update_weights(self, *asked) -> UpdateFailure | None:
        self.updates.append(asked)
        self.go.wait()
        return self.failure

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return reset_running_requests or not self._running

    def statistics(self) -> Statistics:
        return Statistics()

    def require_no_leak(self) -> None:
        assert not self._running

    def silence(self) -> float:
        return self.silent

    def check(self) -> None:
        if self.dead is not None:
            raise self.dead

    def close(self) -> None:
        pass


def fake_llm(runner: FakeRunner | None = None, tokenizer: Tokenizer | None = None) -> LLM:
    """``LLM`` itself, without a model."""
    llm = LLM.__new__(LLM)
    LLMEngine.__init__(llm, runner or FakeRunner(), tokenizer or ChatBytes(), (), awake=True)
    return llm


@dataclass
class Served:
    """A server in this process, with the runner of its ``LLM``."""

    runner: FakeRunner
    service: Service
    http: HTTPServer
    url: str
    port: int
    # An entry for each call of ``on_death``.
    deaths: list[str]


@contextlib.contextmanager
def serving(
    api_key: str | None = None,
    origins: Sequence[str] = (),
    *,
    http_options: Mapping[str, Any] = {},
    step_timeout: float = 60.0,
    tokenizer: Tokenizer | None = None,
    app_options: Mapping[str, Any] = {},
    llm: LLM | None = None,
    **options,
) -> Iterator[Served]:
    """A server around a fake model, on a free port, in a thread; with options of its engine.

    With ``llm`` around that one.
    """
    # Machines without the server's packages test the rest.
    from absorbed_mla.serving.server.app import build_app
    from absorbed_mla.serving.server.http_server import HTTPServer
    from absorbed_mla.serving.server.metrics import Metrics
    from absorbed_mla.serving.server.service import Service

    runner, deaths = FakeRunner(**options), []
    llm = llm or fake_llm(runner, tokenizer)
    metrics = Metrics()
    service = Service(llm, metrics, lambda: deaths.append("died"), step_timeout=step_timeout)
    app = build_app(service, metrics, "tiny", api_key, origins, **app_options)
    http = HTTPServer(app, service, "127.0.0.1", 0, **http_options)
    service.start()
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        until(lambda: http.started)
        port = http.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        yield Served(runner, service, http, url, port, deaths)
    finally:
        runner.go.set()
        http.should_exit = True
        thread.join(20)
        service.stop()
    assert not thread.is_alive()


@contextlib.contextmanager
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal: where tests run in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def until(condition, seconds: float = 10.0) -> None:
    """Wait for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def tiny_folder(path: Path, **changes: Any) -> Path:
    """A Hugging Face checkpoint of a tiny model, in float32, whose tokens are bytes."""
    config = tiny_config(
        vocab_size=257,
        num_hidden_layers=2,
        max_position_embeddings=MAX_MODEL_LEN,
        rope_scaling=None,
        torch_dtype="float32",
        **changes,
    )
    tensors = {name: x * 0.2 for name, x in random_tensors(config, torch.float32).items()}
    return write_hugging_face(path, config, tensors)
