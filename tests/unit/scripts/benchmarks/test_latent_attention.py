"""scripts/benchmarks/latent_attention.py: its rates, a run on a CPU, and how the peer is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from absorbed_mla.core_attention.backends.reference import reference_forward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs
from benchmarks import latent_attention
from benchmarks.kit import processes
from benchmarks.kit.report import Times
from benchmarks.latent_attention import Case, LatentBenchmark, LatentReport, Row
from benchmarks.peers import libraries
from tests.support.one_cpu import OneCPU

TINY = (
    "--device cpu --heads 2 --seq-lens 40 --kv-lora-rank 16 --qk-pos-emb-head-dim 8 "
    "--qk-head-dim 8 --v-head-dim 8 --seconds-per-row 0.01"
)


def attend_as_the_peer(q, k, v, qv, scale, *, cu_seqlens, cu_seqlens_k, max_seqlen, num_splits):
    """In place of ``flash_attention_3``, with its arguments for one sequence."""
    assert cu_seqlens.tolist() == cu_seqlens_k.tolist() == [0, max_seqlen] == [0, len(q)]
    inputs = AttentionInputs(qv[:, None], q[:, None], v[:, None], k, None)
    rules = ScoreRules(scale=scale, spans=(Span(0, len(q), 0, len(q), 0),))
    return reference_forward(inputs, rules).out[:, 0]


@pytest.fixture(autouse=True)
def _on_one_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(processes, "Processes", OneCPU)


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(latent_attention, "require_flash_attention_3", lambda: None)
    monkeypatch.setattr(latent_attention, "flash_attention_3", attend_as_the_peer)
    file = tmp_path / "latent.json"
    assert LatentBenchmark.main([*TINY.split(), "--json", str(file)]) == 0
    out = capsys.readouterr().out
    [found] = json.loads(out.splitlines()[-1])
    measured = {
        (row["work"], row["implementation"]): row for row in found["rows"] if "queued_ms" in row
    }
    assert [*measured] == [
        ("forward", "ours, reference"),
        ("forward", "FlashAttention-3"),
        ("backward", "ours, reference"),
    ]
    assert measured["forward", "FlashAttention-3"]["difference"] < 1e-6
    assert all(row["queued_tflops"] > 0 and row["called_ms"] > 0 for row in measured.values())
    assert "- it needs a GPU: forward n=2 S=40: ours, hopper" in out
    assert len(LatentReport.read(file).measured) == 3


def test_without_the_library(monkeypatch, capsys):
    monkeypatch.setattr(libraries, "FOLDER", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert LatentBenchmark.main([*TINY.split(), "--only", "FlashAttention-3"]) == 0
    assert "_vllm_fa3_C.abi3.so does not exist" in capsys.readouterr().out


def test_rates():
    """Of queued and of waited calls, by the same operations."""
    row = Row(
        case=Case("forward", 2, 8, "ours, hopper"),
        times=Times.of([0.5]),
        called=Times.of([1.0]),
        more={"flops": 1e12, "difference": 0.0},
    )
    found = LatentReport({}).figures(row)
    assert (found["queued_tflops"], found["called_tflops"]) == (2.0, 1.0)
    assert torch.isclose(torch.tensor(found["queued_ms"]), torch.tensor(500.0))
