"""scripts/benchmarks/context_parallel_compute.py: its cases, and a run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.together import Measured

from benchmarks.context_parallel_compute import Case, ComputeBenchmark, ComputeReport, Row, cases
from benchmarks.kit.report import Times
from tests.support.programs import run_script

SCRIPT = Path(__file__).resolve().parents[4] / "scripts/benchmarks/context_parallel_compute.py"
TINY = (
    "--device cpu --heads 2 --seq-lens 64 --cp-sizes 2 --hidden-size 64 --q-lora-rank 32 "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--works all_gather:reference,p2p:reference,p2p:cudnn --seconds-per-row 0.01"
)


def test_a_run_on_a_cpu(tmp_path, capsys):
    """In a process of its own, which is a rank of two; what cannot run leaves the others."""
    file = tmp_path / "compute.json"
    command = [SCRIPT, *TINY.split(), "--json", file]
    done = run_script(*command, CUDA_VISIBLE_DEVICES="", GIT_COMMIT="abc")
    assert done.returncode == 0, done.stderr[-2000:]
    [last] = json.loads(done.stdout.splitlines()[-1])
    assert last["environment"]["communication"].startswith("none")
    assert [row["layout"] for row in last["rows"]] == ["sbhd", "thd"]
    for row in last["rows"]:
        assert row["all_gather:reference step_ms"] > 0 and row["p2p:reference host_ms"] > 0
        # Both exchanges are of the same latents, in the same layer.
        assert row["p2p:reference difference"] < 1e-5
        # 32 tokens of a latent in fp32 from each of two ranks, and its gradient; four shapes.
        gathered = 2 * 2 * 32 * (16 + 8) * 4 + 2 * 4 * 8
        assert row["all_gather:reference messages_mib"] * 2**20 == gathered
    assert "p2p:cudnn: " in done.stdout and "needs a GPU" in done.stdout
    assert "megatron: Megatron's standard MLA needs transformer-engine" in done.stdout
    assert ComputeBenchmark.main(["--render", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == done.stdout.splitlines()[-1]


def test_cases():
    args = ComputeBenchmark.parse(["--heads", "16", "--seq-lens", "8k,4k", "--cp-sizes", "2,4"])
    found = cases(args)
    assert found[0] == Case(2, "sbhd", 4096, 16) and found[-1] == Case(4, "thd", 8192, 16)
    assert found[1].lengths == [1280, 256, 1024, 512, 1024]
    assert len(found) == 8


def test_a_length_that_does_not_divide():
    args = ComputeBenchmark.parse(["--seq-lens", "1000", "--layouts", "thd"])
    with pytest.raises(ValueError, match=r"multiples of 128 .* got 1000"):
        cases(args)


def test_ratio():
    """Of the longer one of host and GPU, whose copies do not count."""

    def work(name: str, step: float, host: float) -> Measured:
        of = [Times(x, x, x, 1) for x in (step / 3, step, step, host)]
        return Measured(name, "", of[0], of[1], of[2], of[3])

    works = [work("p2p:cudnn", 2e-3, 6e-3), work("megatron", 4e-3, 1e-3)]
    messages = {"p2p:cudnn": (2**20, 1e-4), "megatron": (2**30, 1e-3)}
    row = Row(case=Case(2, "sbhd", 64, 2), works=works, messages=messages)
    assert ComputeReport({}, [row]).figures(row)["p2p:cudnn ratio"] == 2
    assert "p2p:cudnn 6.0 ms (2.00), megatron 3.0 ms" in ComputeReport({}, [row]).line(row)
