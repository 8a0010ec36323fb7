"""Test files that say something on a GPU, and the numbers of processes that they run in."""

from __future__ import annotations

import ast
from pathlib import Path

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


def unit_files(root: Path) -> list[str]:
    """Files of ``tests/unit`` that run on a GPU, as paths below ``root``."""
    folder = root / "tests" / "unit"
    found = []
    for path in sorted(folder.rglob("test_*.py")):
        name = path.relative_to(folder).as_posix()
        left_out = any(name == one or name.startswith(f"{one}/") for one in CPU_ONLY)
        if not left_out:
            found.append(path.relative_to(root).as_posix())
    return found


def unit_files_of_several_gpus(root: Path) -> list[str]:
    """Those of :func:`unit_files` that use as many GPUs as there are."""
    return [name for name in unit_files(root) if "device_count()" in (root / name).read_text()]


def distributed_files(root: Path, processes: int) -> list[str]:
    """Files of ``tests/distributed`` with tests for so many processes, as paths below ``root``."""
    found = []
    for path in sorted((root / "tests" / "distributed").glob("test_*.py")):
        counts = process_counts(path.read_text())
        if not counts or processes in counts:
            found.append(path.relative_to(root).as_posix())
    return found


def process_counts(source: str) -> set[int]:
    """Numbers in ``needs.processes(...)`` of a file's ``pytestmark``; none: any number."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "needs.processes":
                    return {ast.literal_eval(argument) for argument in call.args}
    return set()
