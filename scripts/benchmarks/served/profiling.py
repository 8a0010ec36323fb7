"""Where the time of our steps goes: on the host by function, on the GPU by kernel.

Of steps that decode, and of steps that read prompts.

The engine runs in the process that is profiled, not in one of its own as ``LLM`` has it, so that
its functions are seen.
"""

from __future__ import annotations

import cProfile
import io
import itertools
import json
import os
import pstats
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.kit.command import ALONE, run_to_log
from benchmarks.served.burst import Burst
from benchmarks.served.engines import OURS, Ours
from benchmarks.served.settings import Settings

# Rows of each table.
_FUNCTIONS, _KERNELS = 45, 30
_LIMIT = 420
# Steps that decode for each one that reads prompts, which takes longer.
_DECODES = 3


def write(
    file: Path,
    implementations: Sequence[str],
    settings: Settings,
    vocab_size: int,
    *,
    prompt: int,
    steps: int,
    logs: Path,
) -> None:
    """Profile steps of each of ``settings.sizes`` requests, and print the file.

    Args:
        file: Text, which grows after each number of requests.
        implementations: Of ``OURS``, each in a process of its own, one after the other.
        settings: Of the model.
        vocab_size: Token ids of prompts are below it.
        prompt: Tokens of each prompt.
        steps: Decode steps of each profile.
        logs: Folder for what the processes print.

    Raises:
        ValueError: If one fails, with the end of its log.
    """
    # Steps before all requests decode, three times the profiled ones, and some more.
    prompt = min(prompt, settings.max_model_len - 4 * steps)
    work = {"settings": settings.text(), "vocab_size": vocab_size, "prompt": prompt}
    work |= {"steps": steps, "file": str(file.resolve())}
    scripts = Path(__file__).resolve().parents[2]
    path = [os.environ.get("PYTHONPATH", ""), str(scripts), str(scripts.parent)]
    variables = {**ALONE, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    program = "from benchmarks.served.profiling import main; main()"
    file.write_text("")
    for name in implementations:
        given = json.dumps(work | {"implementation": name})
        log = logs / f"{name}-profile.log"
        if run_to_log([sys.executable, "-P", "-c", program, given], log, _LIMIT, variables):
            end = " | ".join(log.read_text().splitlines()[-4:])
            raise ValueError(f"the profile of {name} failed: {end}")
    print(file.read_text())


def main() -> None:
    """Profile in this process; its argument is the work as JSON."""
    given = json.loads(sys.argv[1])
    settings = Settings.read(given["settings"])
    engine = OURS[given["implementation"]](settings)
    for requests in settings.sizes:
        # Compiles, and allocates what later steps use again.
        with _decoding(engine, requests, settings, given) as step:
            _seconds(step, given["steps"])
        with _decoding(engine, requests, settings, given) as step:
            found = {"decode steps": _tables(step, given["steps"], settings)}
        step, steps = _reading(engine, requests, given), -(-given["steps"] // _DECODES)
        _seconds(step, steps)
        found["steps that read prompts"] = _tables(step, steps, settings)
        while engine.is_busy():
            list(engine.step())
        each = f"{given['implementation']}, {requests} requests, "
        each += f"{given['prompt']} tokens in each prompt"
        with Path(given["file"]).open("a") as file:
            file.writelines(f"{each}, {kind}: {tables}\n\n" for kind, tables in found.items())
    engine.close()


@contextmanager
def _decoding(
    engine: Ours, requests: int, settings: Settings, given: dict
) -> Iterator[Callable[[], object]]:
    """A function for one decode step of all requests, which have their first tokens already."""
    new_tokens = settings.max_model_len - given["prompt"]
    burst = Burst(requests, given["prompt"], new_tokens, 0.0, requests, given["vocab_size"])
    names = {str(number): prompt for number, prompt in enumerate(burst.prompts())}
    for name, prompt in names.items():
        engine.add(name, prompt, burst.new_tokens, burst.temperature)
    waiting = set(names)
    while waiting:
        waiting -= {name for name, tokens in engine.step() if tokens}
    yield lambda: list(engine.step())
    for name in names:
        engine.llm.abort(name)
    while engine.is_busy():
        list(engine.step())


def _reading(engine: Ours, requests: int, given: dict) -> Callable[[], None]:
    """A function for one step over prompts, of requests that end with their first tokens.

    It adds requests, other ones each time, when all before have ended.
    """
    seeds, names = itertools.count(1), itertools.count()

    def step() -> None:
        if not engine.is_busy():
            seed = 1000 * requests + next(seeds)
            burst = Burst(requests, given["prompt"], 1, 0.0, seed, given["vocab_size"])
            for prompt in burst.prompts():
                engine.add(f"read {next(names)}", prompt, 1, burst.temperature)
        list(engine.step())

    return step


def _tables(step: Callable[[], object], steps: int, settings: Settings) -> str:
    """Of functions in both orders, and of kernels."""
    plain = _seconds(step, steps)
    profiler = cProfile.Profile()
    profiler.enable()
    profiled = _seconds(step, steps)
    profiler.disable()
    parts = [
        f"{steps} of them: {1e3 * plain:.2f} ms each, {1e3 * profiled:.2f} ms with cProfile",
        *(_functions(profiler, order) for order in ("tottime", "cumulative")),
    ]
    on_gpu = settings.device == "cuda"
    return "\n\n".join([*parts, _kernels(step, steps)] if on_gpu else parts)


def _seconds(step: Callable[[], object], steps: int) -> float:
    """Median of the steps; each waits for its tokens."""
    found = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return median(found)


def _functions(profiler: cProfile.Profile, order: str) -> str:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(_FUNCTIONS)
    return f"Host, by {order}:\n{text.getvalue().strip()}"


def _kernels(step: Callable[[], object], steps: int) -> str:
    """The GPU's busiest kernels; its time of a step is the sum over kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
    found = profiler.key_averages()
    busy = sum(one.self_device_time_total for one in found if one.device_type.name == "CUDA")
    rows = found.table(sort_by="self_cuda_time_total", row_limit=_KERNELS, max_name_column_width=90)
    return f"GPU: {busy / steps / 1e3:.3f} ms of kernels each step\n{rows}"
