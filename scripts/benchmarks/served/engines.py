"""The engines behind two implementations of ``LLM``, step by step, and what they are started with.

``add`` queues a request for so many tokens, ``is_busy`` says whether one has not ended, ``step``
waits for a step and gives names of requests and how many tokens each got, ``close`` frees all.

In a process of its own (:func:`main`) an engine reads bursts from stdin, one JSON a line, and
answers with figures.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.served.adapters import RANK, write_adapters
from benchmarks.served.burst import Burst, Timeline

# Tokens of a block of the cache, of ours and as it is asked of vLLM.
BLOCK = 64
# Settings that are options of ``LLM`` and of our server.
OUR_OPTIONS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "cache_tokens", "device"),
)
# Of an output without an end.
_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["first", "second", None]},
        "values": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "kind", "values"],
    "additionalProperties": False,
}
_SCHEMA = {"type": "array", "items": _OBJECT, "minItems": 100_000}


@dataclass(frozen=True)
class Settings:
    """Of one model in one process, equal for all implementations."""

    model: str  # folder with the checkpoint
    device: str  # "cuda" or "cpu"
    max_model_len: int  # longest prompt and output together, in tokens
    max_num_seqs: int  # most requests of a step
    max_num_batched_tokens: int  # most tokens of a step, beside one of each of max_num_seqs
    cache_tokens: int  # that the latent cache holds
    token_bytes: int  # of one token in the cache, all layers
    sizes: tuple[int, ...]  # numbers of requests of the measured decode steps
    graphs: bool  # whether decode steps are captured as CUDA graphs

    @classmethod
    def read(cls, text: str) -> Settings:
        """The inverse of :meth:`text`."""
        fields = json.loads(text)
        return cls(**{**fields, "sizes": tuple(fields["sizes"])})

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step, which vLLM calls ``max_num_batched_tokens``."""
        return self.max_num_batched_tokens + self.max_num_seqs

    @property
    def captured(self) -> list[int]:
        """Numbers of tokens for which vLLM captures CUDA graphs: those measured and powers of 2."""
        powers = {2**power for power in range(self.max_num_seqs.bit_length())}
        return sorted(one for one in powers | set(self.sizes) if one <= self.max_num_seqs)


class _Ours:
    """``absorbed_mla.LLM``; ``structured`` has outputs be JSON, others are options of it.

    Requests take turns with the adapters that there is room for, if there is.
    """

    def __init__(self, settings: Settings, *, structured: bool = False, **options: Any) -> None:
        from absorbed_mla import LLM, StructuredOutputsParams
        from absorbed_mla.lora import LoRARequest

        self._outputs = StructuredOutputsParams(json=_SCHEMA) if structured else None
        options |= {name: getattr(settings, name) for name in OUR_OPTIONS}
        options |= {"enable_prefix_caching": False, "cuda_graphs": settings.graphs}
        self._llm = LLM(settings.model, **options)
        self._seen: dict[str, int] = {}
        self._folder = TemporaryDirectory()
        folders, count = [], options.get("max_loras", 0)
        if count:
            folders = write_adapters(Path(settings.model), Path(self._folder.name), count)
        self._adapters = itertools.cycle(
            [LoRARequest(one.name, i + 1, one) for i, one in enumerate(folders)] or [None]
        )

    def add(self, name: str, prompt: list[int], new_tokens: int, temperature: float) -> None:
        from absorbed_mla import SamplingParams

        options = {"temperature": temperature, "structured_outputs": self._outputs}
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **options)
        adapter = next(self._adapters)
        self._seen[self._llm.add_request(prompt, params, name, lora_request=adapter)] = 0

    def is_busy(self) -> bool:
        return self._llm.has_unfinished_requests()

    def step(self) -> Iterable[tuple[str, int]]:
        for output in self._llm.step():
            name, count = output.request_id, len(output.outputs[0].token_ids)
            yield name, count - self._seen[name]
            self._seen[name] = count

    def close(self) -> None:
        self._llm.close()
        self._folder.cleanup()


class _VLLM:
    """``vllm.LLM``, whose engine runs in a process of its own, which ends with this one."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        self._engine = LLM(model=settings.model, **vllm_options(settings)).llm_engine

    def add(self, name: str, prompt: list[int], new_tokens: int, temperature: float) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {"temperature": temperature, "output_kind": RequestOutputKind.DELTA}
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **options)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def is_busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def step(self) -> Iterable[tuple[str, int]]:
        for output in self._engine.step():
            yield output.request_id, len(output.outputs[0].token_ids)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def vllm_options(settings: Settings) -> dict[str, object]:
    """Options of ``vllm.LLM``; those of ``vllm serve`` have dashes."""
    return {
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.step_tokens,
        "kv_cache_memory_bytes": settings.cache_tokens * settings.token_bytes,
        # What is checked to be free at the start; the cache has the size above.
        "gpu_memory_utilization": 0.1,
        "block_size": BLOCK,
        "enable_prefix_caching": False,
        **({"cudagraph_capture_sizes": settings.captured} if settings.graphs else {}),
        "enforce_eager": not settings.graphs,
        "generation_config": "vllm",
        "seed": 0,
    }


def run(engine: Any, burst: Burst) -> dict[str, float | None]:
    """Figures of a burst, see ``Timeline``; time begins before the first request is added.

    Requests that end in a step are replaced before the next one, as long as there are others.
    """
    prompts, left, timeline = burst.prompts(), burst.outputs(), Timeline(burst)
    numbers = {f"{burst.seed}-{number}": number for number in range(burst.total)}
    waiting = iter(numbers.items())
    begin = time.perf_counter()

    def add(count: int) -> None:
        for name, number in itertools.islice(waiting, count):
            timeline.sent[number] = time.perf_counter() - begin
            engine.add(name, prompts[number], left[number], burst.temperature)

    add(burst.requests)
    while engine.is_busy():
        grown = [(numbers[name], tokens) for name, tokens in engine.step() if tokens]
        now = time.perf_counter() - begin
        for number, tokens in grown:
            timeline.arrivals[number].append((now, tokens))
            left[number] -= tokens
        add(sum(left[number] == 0 for number, _ in grown))
    return timeline.figures()


# Those of ours are the same `LLM`.
ENGINES: dict[str, Callable[[Settings], Any]] = {
    "ours": _Ours,
    "ours-lora": partial(_Ours, enable_lora=True, max_loras=4, max_lora_rank=2 * RANK),
    "ours-parity": partial(_Ours, parity=True),
    "ours-parity-parts": partial(_Ours, parity=True, tensor_parallel_parts=8),
    "ours-structured": partial(_Ours, structured=True),
    "vllm": _VLLM,
}


def main() -> None:
    """Serve bursts until stdin ends; arguments are the engine's name and the settings as JSON."""
    [name, settings] = sys.argv[1:]
    # Whatever libraries print goes to the log.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = ENGINES[name](Settings.read(settings))
        # Full collections would look at all that was imported, amid a burst.
        gc.freeze()
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            try:
                answer: dict = run(engine, Burst(**json.loads(line)))
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
        engine.close()
