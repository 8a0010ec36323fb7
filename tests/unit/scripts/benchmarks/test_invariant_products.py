"""scripts/benchmarks/invariant_products.py: a run on a CPU, its figures, and bits that differ."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import invariant_products
from benchmarks.invariant_products import Case, ProductBenchmark, ProductReport, Row
from benchmarks.kit import processes
from benchmarks.kit.report import Times
from tests.support.backends import multiply_in_one_order, triton_interpreter
from tests.support.one_cpu import OneCPU

with triton_interpreter():
    import absorbed_mla.kernels.invariant.matrix_product  # noqa: F401

TINY = "--device cpu --works 40x33 --rows 1,70 --seconds-per-row 0.01"


@pytest.fixture(autouse=True)
def _on_one_cpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(processes, "Processes", OneCPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(invariant_products, "_COPIES_BYTES", 1e4)
    multiply_in_one_order(monkeypatch)
    with triton_interpreter():
        yield


def test_a_run_on_a_cpu(tmp_path, capsys):
    file = tmp_path / "products.json"
    options = ["--tiles", "64x32x4x2", "--json", str(file)]
    assert ProductBenchmark.main([*TINY.split(), *options]) == 0
    [found] = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["rows"], row["implementation"]): row for row in found["rows"]}
    names = {"torch", "ours", "megatron mm", "megatron TE", "ours 64x32x4x2"}
    assert {name for _, name in rows} == names
    for count in (1, 70):
        ours = rows[count, "ours"]
        assert ours["ratio"] > 0 and ours["changed"] == 0 and "ratio" not in rows[count, "torch"]
    assert len(ProductReport.read(file).rows) == 10


def test_bits_that_differ(capsys, monkeypatch):
    def variants(x, weight):
        return [("tile 1x1", lambda left, right: left @ right + 1)]

    monkeypatch.setattr(invariant_products, "_variants", variants)
    assert ProductBenchmark.main(TINY.split()) == 1
    assert "- 40x33, 70 rows: ours: tile 1x1" in capsys.readouterr().out


def test_figures():
    report = ProductReport({})
    for name, seconds in (("torch", 2e-6), ("ours", 3e-6)):
        report.rows.append(Row(case=Case("100x50", 1, name), times=Times.of([seconds])))
    found = report.figures(report.rows[1])
    expected = {"us": 3.0, "tbps": 2 * 5150 / 3e6, "tflops": 1e4 / 3e6, "ratio": 1.5, "changed": 0}
    assert found == pytest.approx(expected)
    assert Case("q_up", 1, "ours").widths == (1536, 24576)
