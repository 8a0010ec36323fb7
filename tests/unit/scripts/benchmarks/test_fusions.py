"""scripts/benchmarks/fusions.py: its cases, a run on a CPU, and works that are taken in turns."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.together import Work, measure_together

from benchmarks.fusions import Case, FusionsBenchmark, cases
from benchmarks.kit.timing import Repeated, in_turns
from tests.support.programs import run_script

SCRIPTS = Path(__file__).resolve().parents[4] / "scripts"
TINY = (
    "--device cpu --heads 2 --seq-lens 8 --hidden-size 64 --q-lora-rank 32 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --seconds-per-row 0.01"
)
ON_CPU = SimpleNamespace(on_gpu=False, synchronize=lambda: None)


def test_a_run_on_a_cpu(tmp_path, capsys):
    """In a process of its own, which leaves its groups."""
    file, script = tmp_path / "fusions.json", SCRIPTS / "benchmarks/fusions.py"
    command = [script, *TINY.split(), "--json", file]
    done = run_script(*command, CUDA_VISIBLE_DEVICES="", GIT_COMMIT="abc")
    assert done.returncode == 0, done.stderr[-2000:]
    [last] = json.loads(done.stdout.splitlines()[-1])
    rows = {row["kind"]: row for row in last["rows"]}
    assert list(rows) == ["query", "keys", "down", "layer"]
    assert rows["query"]["ours forward_tbps"] > 0 and rows["query"]["copy host_us"] > 0
    assert "- query n=2 S=8, megatron's fused RoPE: it needs a GPU" in done.stdout
    # One product computes what two compute, for tensors as well as for layers.
    names = [f"{name} difference" for name in ("one of tensors", "two layers", "one of layers")]
    assert max(rows["down"][name] for name in names) < 1e-6
    assert rows["layer"]["separate difference"] == 0 and rows["layer"]["fused difference"] < 1e-6
    assert FusionsBenchmark.main(["--render", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_cases():
    args = FusionsBenchmark.parse(["--heads", "128,16", "--seq-lens", "8k,4k"])
    found = cases(args)
    assert found[:2] == [Case("query", 16, 4096), Case("query", 16, 8192)]
    assert [str(case) for case in found if case.kind == "down"] == ["down S=4096", "down S=8192"]
    assert len(found) == 14


def test_works_take_turns():
    """And what cannot run leaves the others as they are."""
    order = []
    a, b = (Repeated(lambda name=name: order.append(name), on_gpu=False) for name in "ab")
    assert [len(steps) for steps in in_turns([a, b], 4)] == [4, 4]
    # Three to see how long the host takes, then there and back.
    assert order == list("ab" * 3 + "abba" * 2)


def test_a_work_that_fails_is_an_error_of_its_own():
    def work(name: str, value: float, **more) -> Work:
        return Work(name, lambda: torch.full((3,), value), outputs=lambda x: (x,), **more)

    def fail() -> None:
        raise ValueError("no such thing")

    works = [
        Work.attempt("unbuilt", fail),
        Work("broken", fail),
        work("first", 2.0),
        work("second", 3.0, traffic=(8, 4)),
    ]
    unbuilt, broken, first, second = measure_together(works, ON_CPU, 0.001)
    assert unbuilt.error == broken.error == "ValueError: no such thing"
    assert first.difference == 0 and second.difference == pytest.approx(0.5)
    numbers = second.numbers()
    assert numbers["forward_tbps"] * numbers["forward_us"] == pytest.approx(8e-6)
    assert "forward_tbps" not in first.numbers()
