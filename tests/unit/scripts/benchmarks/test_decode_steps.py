"""scripts/benchmarks/decode_steps.py on the CPU: both loops, with equal tokens."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest

from benchmarks import decode_steps
from benchmarks.decode_steps import Case, StepsBenchmark
from tests.support.programs import run_script

TINY = shlex.split(
    "--device cpu --modes parity --batch 1,2 --draws sampled --prompt 20 --steps 2 --num-layers 1 "
    "--hidden-size 32 --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --heads 2 --ffn-hidden-size 32 --vocab-size 64"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    file = tmp_path_factory.mktemp("steps") / "out.json"
    done = run_script(decode_steps.__file__, *TINY, "--json", file)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(file.read_text())["rows"]


def test_rows(rows):
    kinds = [(row["case"]["loop"], row["case"]["batch"]) for row in rows]
    assert kinds == [("megatron", 1), ("loop", 1), ("megatron", 2), ("loop", 2)]
    assert not any(row["error"] for row in rows)
    assert all(0 < row["host_ms"] <= row["step_ms"] for row in rows)


def test_other_tokens_are_an_error():
    case = Case("default", "loop", 2, "greedy")
    known = {Case("default", "megatron", 2, "greedy"): [[1, 2], [3, 4]]}
    benchmark = SimpleNamespace(_tokens=known)
    assert not StepsBenchmark._differs(benchmark, case, [[1, 2], [3, 4]])
    found = StepsBenchmark._differs(benchmark, case, [[1, 2], [3, 5]])
    assert found == "request 1 has other tokens than with Megatron's scheduler"
