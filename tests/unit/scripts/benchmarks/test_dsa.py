"""scripts/benchmarks/dsa.py: a run on a CPU, its counts and its indices."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from benchmarks.dsa import Case, DSABenchmark, DSAReport, _selection, _union
from tests.support.backends import triton_interpreter

with triton_interpreter():
    import absorbed_mla.kernels.dsa.backward
    import absorbed_mla.kernels.dsa.forward
    import absorbed_mla.kernels.dsa.index_scores
    import absorbed_mla.kernels.dsa.radix_select  # noqa: F401

TINY = (
    "--device cpu --heads 2 --queries 8 --topk 8 --kv 32 --indexer 64 --indexer-heads 2 "
    "--kv-lora-rank 32 --qk-pos-emb-head-dim 16 --seconds-per-row 0.01"
)


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GIT_COMMIT", "abc")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    files = tmp_path / "dsa.json", tmp_path / "dsa.png"
    more = ["--json", str(files[0]), "--plot", str(files[1])]
    assert DSABenchmark.main([*TINY.split(), *more]) == 0
    out = capsys.readouterr().out
    [last] = json.loads(out.splitlines()[-1])
    measured = [row for row in last["rows"] if "ms" in row]
    assert [row["implementation"] for row in measured] == [
        *("triton", "triton"),
        *("triton", "triton, in order") * 2,
        "triton",
    ]
    assert all(row["difference"] < 1e-5 for row in measured[:-1])
    assert measured[-1]["exact"] and measured[-1]["share"] > 0
    assert "- it needs compute capability 9.0: forward n=2" in out
    assert len(DSAReport.read(files[0]).measured) == len(measured)


def test_counts_are_those_of_published_figures():
    """FlashMLA on an H200: 3.85 ms are 607 TFLOP/s; TileLang's backward 33.4 ms, 177 TFLOP/s."""
    benchmark = DSABenchmark(DSABenchmark.parse([]))
    for work, seconds, rate in (("forward", 3.85e-3, 607), ("backward", 33.4e-3, 177)):
        flops = benchmark._flops(Case(work, 128, 8192, False, "hopper"))
        assert flops / seconds / 1e12 == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize("shared", [False, True])
def test_indices(shared):
    make = torch.Generator().manual_seed(0)
    chosen = _selection(64, 4096, 512, shared, make)
    assert chosen.shape == (64, 1, 512) and chosen.dtype == torch.int32
    rows = chosen[:, 0]
    assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < 4096
    common = [len(set(a) & set(b)) / 512 for a, b in zip(rows.tolist(), rows[1:].tolist())]
    assert min(common) >= 0.8 if shared else max(common) < 0.3
    assert 1 < _union(chosen) < (1.5 if shared else 4)
