"""Test files that say something on a GPU, and the processes that run them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Seconds of the tests of each file on an H100, by number of processes: what run_gpu_tests.sh wrote.
SECONDS = Path(__file__).with_name("seconds.json")
# To import PyTorch, Megatron and TransformerEngine, and to begin to use a GPU.
START = 15.0
# Of a file that SECONDS does not have.
_UNKNOWN = {"unit": 20.0, "distributed": 40.0}
# Of a test that takes most of a GPU's memory.
_LARGE = 10.0
# Files of fewer seconds are run by one process, together so many.
_SHORT, TOGETHER = 12.0, 40.0
# Folders and files below tests/unit whose tests no GPU changes: plain Python, kernels that are
# emulated or compiled only, the command line, documents.
CPU_ONLY = (
    "project",
    "scripts",
    "testing",
    "serving/server",
    "context_parallel/test_choice.py",
    "context_parallel/test_layout.py",
    "core_attention/masks/test_device_spans.py",
    "core_attention/masks/test_spans.py",
    "core_attention/masks/test_tiles.py",
    "dsa/test_config.py",
    "serving/test_engine_options.py",
    "serving/tokenizers/test_detokenizer.py",
    "inference/test_staging_buffers.py",
    "inference/test_prefill_context_parallel.py",
    "kernels/test_compiled_code.py",
    "kernels/test_compiled_for_hopper.py",
    "kernels/test_gluon_emulation.py",
    "kernels/test_hopper_latent.py",
    "kernels/test_launch.py",
    "kernels/test_registration.py",
    "kernels/test_tensor_map.py",
    "serving/executor/test_dp_load_balancer.py",
    "serving/executor/test_local.py",
    "serving/tokenizers/test_folder.py",
    "serving/tokenizers/test_tokenizers.py",
)
# They have a process of their own disturb the GPU. (Tests that measure memory measure that of their
# process.)
ALONE = ("tests/unit/kernels/test_shared_gpu.py",)
# Tests, by pytest's ids, that take more of a GPU's memory than jobs get side by side: they run in
# one process, after the others and without a bound. (The longest takes 37 GiB.)
LARGE = (
    "tests/unit/kernels/test_far_heads.py::test_same_bits[attention_gradient]",
    "tests/unit/kernels/test_latent_kernels_gpu.py::test_half_a_million_tokens",
    "tests/unit/kernels/test_multi_head.py::TestOnAGpu::test_a_million_tokens",
)
# Files that take minutes: each of these tests has a job of its own, the others of the file have one
# together.
DIVIDED = {
    "tests/unit/kernels/test_paged_hopper_gpu.py": (
        "test_equals_the_reference",
        "test_pieces_of_one_request_and_of_many",
    ),
    "tests/unit/serving/test_llm_gpu.py": (
        "test_log_probs_of_transformers",
        "test_graphs_of_prompts",
        "test_experts",
    ),
}


@dataclass(frozen=True)
class Job:
    """Test files that one command runs."""

    files: tuple[str, ...]  # paths below the root of the repository
    processes: int  # 0: one process of pytest; else so many, with torchrun
    gpus: int  # how many it sees
    seconds: float  # that it may take
    alone: bool = False  # whether nothing else may run on the GPUs meanwhile
    tests: tuple[str, ...] = ()  # ids of pytest of the tests that are run; none: all of the files
    # Ids, or how they begin, of tests of the files that other jobs run.
    left_out: tuple[str, ...] = ()


def jobs_of(root: Path, gpus: int, known: Mapping[str, float]) -> list[Job]:
    """All jobs of tests of so many GPUs, the longest first.

    Args:
        root: Of the repository.
        gpus: 1: ``tests/unit``, and ``tests/distributed`` with one process. More:
            ``tests/distributed`` with so many, and the unit tests that use several.
        known: Seconds by file.
    """
    unit = unit_files(root) if gpus == 1 else unit_files_of_several_gpus(root)
    jobs = [*_jobs(unit, 0, gpus, known), *_jobs(distributed_files(root, gpus), gpus, gpus, known)]
    large = _large_tests_of(unit)
    if large:
        names = tuple(dict.fromkeys(test.partition("::")[0] for test in large))
        jobs.append(Job(names, 0, gpus, START + _LARGE * len(large), alone=True, tests=large))
    return sorted(jobs, key=lambda job: (job.alone, -job.seconds))


def shard_of(jobs: Sequence[Job], number: int, count: int) -> list[Job]:
    """One of ``count`` parts that take about equally long; numbers begin with 1."""
    parts: list[list[Job]] = [[] for _ in range(count)]
    for job in jobs:
        min(parts, key=lambda part: sum(one.seconds for one in part)).append(job)
    return parts[number - 1]


def known_seconds(gpus: int) -> dict[str, float]:
    """Seconds by file, as measured before with so many GPUs."""
    return json.loads(SECONDS.read_text()).get(str(gpus), {}) if SECONDS.exists() else {}


def _jobs(files: Iterable[str], processes: int, gpus: int, known: Mapping[str, float]) -> list[Job]:
    """Short files of a folder run together, others in a job of their own or in several."""
    jobs: list[Job] = []
    short: dict[str, list[list[str]]] = {}  # by folder
    for name in files:
        seconds = _expected(name, known)
        if name in ALONE or name in DIVIDED or seconds >= _SHORT:
            divided = tuple(f"{name}::{test}" for test in DIVIDED.get(name, ()))
            equal = START + seconds / (1 + len(divided))
            left_out = (*divided, *_large_tests_of([name]))
            jobs.append(Job((name,), processes, gpus, equal, name in ALONE, left_out=left_out))
            jobs += [Job((name,), processes, gpus, equal, tests=(test,)) for test in divided]
            continue
        groups = short.setdefault(str(Path(name).parent), [[]])
        if sum(_expected(one, known) for one in groups[-1]) + seconds > TOGETHER:
            groups.append([])
        groups[-1].append(name)
    for group in (group for groups in short.values() for group in groups):
        seconds = START + sum(_expected(one, known) for one in group)
        left_out = _large_tests_of(group)
        jobs.append(Job(tuple(group), processes, gpus, seconds, left_out=left_out))
    return jobs


def _expected(name: str, known: Mapping[str, float]) -> float:
    return known.get(name, _UNKNOWN["unit" if "/unit/" in name else "distributed"])


def _large_tests_of(files: Sequence[str]) -> tuple[str, ...]:
    return tuple(test for test in LARGE if test.partition("::")[0] in files)


def unit_files(root: Path) -> list[str]:
    """Files of ``tests/unit`` that run on a GPU, as paths below ``root``."""
    folder = root / "tests" / "unit"
    return [
        path.relative_to(root).as_posix()
        for path in sorted(folder.rglob("test_*.py"))
        if not any(path.is_relative_to(folder / one) for one in CPU_ONLY)
    ]


def unit_files_of_several_gpus(root: Path) -> list[str]:
    """Those of :func:`unit_files` that use as many GPUs as there are."""
    return [name for name in unit_files(root) if "device_count()" in (root / name).read_text()]


def distributed_files(root: Path, processes: int) -> list[str]:
    """Files of ``tests/distributed`` with tests for so many processes, as paths below ``root``."""
    return [
        path.relative_to(root).as_posix()
        for path in sorted((root / "tests" / "distributed").glob("test_*.py"))
        if processes in (process_counts(path.read_text()) or {processes})
    ]


def process_counts(source: str) -> set[int]:
    """Numbers in ``needs.processes(...)`` of a file's ``pytestmark``; none: any number."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs.processes":
                    return {ast.literal_eval(argument) for argument in call.args}
    return set()
