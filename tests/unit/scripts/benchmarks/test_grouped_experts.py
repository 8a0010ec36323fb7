"""scripts/benchmarks/grouped_experts.py: a run on a CPU, with and without Triton's interpreter."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import grouped_experts
from benchmarks.grouped_experts import KINDS, ExpertsBenchmark, ExpertsReport
from benchmarks.kit import processes
from tests.support.backends import triton_interpreter
from tests.support.one_cpu import OneCPU

with triton_interpreter():
    import absorbed_mla.kernels.invariant.grouped_product
    import absorbed_mla.kernels.moe.choice
    import absorbed_mla.kernels.moe.order
    import absorbed_mla.kernels.moe.skinny_gemm
    import absorbed_mla.kernels.moe.sums
    import absorbed_mla.kernels.moe.swiglu  # noqa: F401

TINY = (
    "--device cpu --experts 8 --topk 4 --hidden-size 32 --moe-ffn-hidden-size 16 --tokens 3 "
    "--seconds-per-row 0.01"
)


@pytest.fixture(autouse=True)
def _on_one_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(processes, "Processes", OneCPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(capsys, *options: str) -> tuple[dict[str, dict], str]:
    assert ExpertsBenchmark.main([*TINY.split(), *options]) == 0
    out = capsys.readouterr().out
    [found] = json.loads(out.splitlines()[-1])
    return {row["kind"]: row for row in found["rows"]}, out


def test_ours_give_what_pytorch_gives(tmp_path, capsys):
    file = tmp_path / "experts.json"
    with triton_interpreter():
        rows, _ = run(capsys, "--json", str(file))
    assert list(rows) == list(KINDS)
    for kind, row in rows.items():
        assert row["ours forward_us"] > 0 and row["ours difference"] < 1e-6, kind
    assert rows["out_of"]["parity difference"] < 1e-6
    assert rows["into"]["torch forward_tbps"] > 0 and "torch forward_tbps" not in rows["sums"]
    assert len(ExpertsReport.read(file).rows) == len(KINDS)


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(grouped_experts, "_is_interpreted", lambda: False)
    rows, out = run(capsys, "--cases", "order")
    assert "torch forward_us" in rows["order"] and "ours forward_us" not in rows["order"]
    assert "- order T=3, ours: it needs a GPU" in out
