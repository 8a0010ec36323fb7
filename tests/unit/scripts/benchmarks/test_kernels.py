"""Benchmarks of kernels: their counts, their peers, and results that are wrong."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from absorbed_mla.core_attention.backends.reference import reference_forward
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs
from benchmarks import grouped_experts, invariant_products, kit, latent_attention
from benchmarks.cached_attention import CachedCase, flops, offloaded_bytes
from benchmarks.drawing import DrawingBenchmark
from benchmarks.dsa import DSABenchmark, DSACase
from benchmarks.dsa_inputs import selection, union
from benchmarks.fusions import FusionCase, FusionsBenchmark
from benchmarks.invariant_products import ProductBenchmark, ProductCase, ProductReport
from benchmarks.kit import Times, processes
from benchmarks.latent_attention import LatentBenchmark, LatentCase, LatentReport
from benchmarks.peers import libraries
from benchmarks.qk_clip import QKClipBenchmark, QKClipReport
from benchmarks.qk_clip_attention import AttentionCase, AttentionRow
from tests.support.backends import multiply_in_one_order, triton_interpreter

with triton_interpreter():
    import absorbed_mla.kernels.invariant.matrix_product
    import absorbed_mla.testing.token_weights  # noqa: F401
    from absorbed_mla.kernels.sampling import draw


@pytest.fixture(autouse=True)
def _on_one_cpu(monkeypatch):
    """In this process, without process groups."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Benchmarks of sparse attention set it, which must not stay.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(processes, "Processes", processes.Device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(benchmark, capsys, *options: str, code: int = 0) -> tuple[list[dict], str]:
    assert benchmark.main(["--quick", *options]) == code
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1])[0]["rows"], out


def test_counts_of_cached_attention():
    """Pairs, products and bytes, counted one by one."""
    case = CachedCase("prefill", heads=3, batch=1, queries=4, context=5)
    pairs = sum(1 for query in range(5, 9) for key in range(9) if key <= query)
    assert case.pairs == pairs
    assert flops(case, kit.DIMS) == {
        "attention": 3 * pairs * 2 * (192 + 128),
        "expansion": 9 * 3 * 2 * 512 * (128 + 128),
    }
    case = CachedCase("offload", heads=16, batch=3, queries=1, context=99, resident=25)
    assert offloaded_bytes(case, kit.DIMS, 2) == 3 * 75 * 576 * 2


class TestSparse:
    def test_counts_are_those_of_published_figures(self):
        """FlashMLA on an H200: 3.85 ms are 607 TFLOP/s; TileLang's backward 33.4 ms, 177."""
        benchmark = DSABenchmark(DSABenchmark.parse([]))
        for work, seconds, rate in (("forward", 3.85e-3, 607), ("backward", 33.4e-3, 177)):
            count = benchmark.flops(DSACase(work, 128, 8192, False, "hopper"))
            assert count / seconds / 1e12 == pytest.approx(rate, rel=2e-3)

    @pytest.mark.parametrize("shared", [False, True])
    def test_indices(self, shared):
        make = torch.Generator().manual_seed(0)
        chosen = selection(64, 4096, 512, shared, make)
        assert chosen.shape == (64, 1, 512) and chosen.dtype == torch.int32
        rows = chosen[:, 0]
        assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0 and rows.max() < 4096
        common = [len(set(a) & set(b)) / 512 for a, b in zip(rows.tolist(), rows[1:].tolist())]
        assert min(common) >= 0.8 if shared else max(common) < 0.3
        assert 1 < union(chosen) < (1.5 if shared else 4)


class TestDrawing:
    def test_ours_draw_what_pytorch_draws(self, capsys):
        with triton_interpreter():
            options = "--draws greedy,top_p,min_p --logits peaked"
            rows, _ = run(DrawingBenchmark, capsys, *options.split())
        assert len(rows) == 6
        for row in rows:
            assert row["ours_us"] > 0 and row["torch_us"] > 0, row
            assert row["ratio"] == pytest.approx(row["ours_us"] / row["torch_us"], rel=1e-12)
            assert row["equal"] == 1

    @pytest.mark.parametrize("requests", [1, 2])
    def test_other_tokens_are_an_error(self, capsys, monkeypatch, requests):
        """Also those of a request that depend on how many there are."""
        right = draw.draw_tokens

        def wrong(logits, numbers, *, filters):
            found = right(logits, numbers, filters=filters)
            found[-1] = 7 if len(found) == requests else found[-1]
            return found

        monkeypatch.setattr(draw, "draw_tokens", wrong)
        with triton_interpreter():
            options = "--draws sampled --logits flat"
            rows, _ = run(DrawingBenchmark, capsys, *options.split(), code=1)
        assert [row["requests"] for row in rows if "error" in row] == [requests]
        [error] = [row["error"] for row in rows if "error" in row]
        wanted = f"1 of {requests} tokens are wrong: request {requests - 1} has 7 instead of "
        assert error.startswith(wanted)


class TestProducts:
    @pytest.fixture(autouse=True)
    def _in_one_order(self, monkeypatch):
        monkeypatch.setattr(invariant_products, "_COPIES_BYTES", 1e4)
        multiply_in_one_order(monkeypatch)
        with triton_interpreter():
            yield

    def test_a_run_on_a_cpu(self, tmp_path, capsys):
        file = tmp_path / "products.json"
        found, _ = run(ProductBenchmark, capsys, "--tiles", "64x32x4x2", "--json", str(file))
        rows = {(row["rows"], row["implementation"]): row for row in found}
        names = {"torch", "ours", "megatron mm", "megatron TE", "ours 64x32x4x2"}
        assert {name for _, name in rows} == names
        for count in (1, 70):
            ours = rows[count, "ours"]
            assert ours["ratio"] > 0 and ours["changed"] == 0
            assert "ratio" not in rows[count, "torch"]
        assert len(ProductReport.read(file).rows) == 10

    def test_bits_that_differ(self, capsys, monkeypatch):
        def variants(x, weight):
            return [("tile 1x1", lambda left, right: left @ right + 1)]

        monkeypatch.setattr(invariant_products, "_variants", variants)
        _, out = run(ProductBenchmark, capsys, code=1)
        assert "- 40x33, 70 rows: ours: tile 1x1" in out


def test_figures_of_products():
    report = ProductReport({})
    for name, seconds in (("torch", 2e-6), ("ours", 3e-6)):
        case = ProductCase("100x50", 1, name)
        report.rows.append(invariant_products.Row(case=case, times=Times.of([seconds])))
    found = report.figures(report.rows[1])
    expected = {"us": 3.0, "tbps": 2 * 5150 / 3e6, "tflops": 1e4 / 3e6, "ratio": 1.5, "changed": 0}
    assert found == pytest.approx(expected)
    assert ProductCase("q_up", 1, "ours").widths == (1536, 24576)


def test_experts_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("absorbed_mla.kernels.triton.common.interpreted", lambda: False)
    rows, out = run(grouped_experts.ExpertsBenchmark, capsys, "--cases", "order")
    assert "torch forward_us" in rows[0] and "ours forward_us" not in rows[0]
    assert "- order T=3, ours: it needs a GPU" in out


class TestLatent:
    def test_the_peer_gets_our_inputs(self, capsys, monkeypatch):
        def attend(q, k, v, qv, scale, *, cu_seqlens, cu_seqlens_k, max_seqlen, num_splits):
            """In place of ``flash_attention_3``, with its arguments for one sequence."""
            assert cu_seqlens.tolist() == cu_seqlens_k.tolist() == [0, max_seqlen] == [0, len(q)]
            inputs = AttentionInputs(qv[:, None], q[:, None], v[:, None], k, None)
            rules = ScoreRules(scale=scale, spans=(Span(0, len(q), 0, len(q), 0),))
            return reference_forward(inputs, rules).out[:, 0]

        monkeypatch.setattr(latent_attention, "require_flash_attention_3", lambda: None)
        monkeypatch.setattr(latent_attention, "flash_attention_3", attend)
        rows, _ = run(LatentBenchmark, capsys, "--works", "forward")
        found = {row["implementation"]: row for row in rows if "queued_ms" in row}
        assert list(found) == ["ours, reference", "FlashAttention-3"]
        assert found["FlashAttention-3"]["difference"] < 1e-6

    def test_without_the_library(self, monkeypatch, capsys):
        monkeypatch.setattr(libraries, "FOLDER", Path("/nowhere"))
        monkeypatch.setitem(sys.modules, "vllm", None)
        _, out = run(LatentBenchmark, capsys, "--only", "FlashAttention-3")
        assert "_vllm_fa3_C.abi3.so does not exist" in out

    def test_rates(self):
        """Of queued and of waited calls, by the same operations."""
        row = latent_attention.Row(
            case=LatentCase("forward", 2, 8, "ours, hopper"),
            times=Times.of([0.5]),
            called=Times.of([1.0]),
            more={"flops": 1e12, "difference": 0.0},
        )
        found = LatentReport({}).figures(row)
        assert (found["queued_tflops"], found["called_tflops"]) == (2.0, 1.0)
        assert found["queued_ms"] == pytest.approx(500.0)


def test_wrong_maxima(capsys):
    """The exit code says so: too small ones, bounds that are none, and what is no number."""
    case, right = AttentionCase("maxima", "cudnn", 2, 30), {"worst": 1e-6, "above_bound": -0.1}
    benchmark = QKClipBenchmark.__new__(QKClipBenchmark)
    wrong = ({"worst": 1e-3}, {"worst": math.nan}, {"above_bound": 1e-3})
    for changes, expected in (({}, 0), *((one, 1) for one in wrong)):
        report = QKClipReport({}, [AttentionRow(case=case, **{**right, **changes})])
        assert benchmark.exit_code(report) == expected
        assert ("wrong: maxima cudnn n=2" in capsys.readouterr().err) == bool(expected)


def test_cases_of_fusions():
    options = ["--heads", "128,16", "--seq-lens", "8k,4k"]
    found = FusionsBenchmark.cases(SimpleNamespace(args=FusionsBenchmark.parse(options)))
    assert found[:2] == [FusionCase("query", 16, 4096), FusionCase("query", 16, 8192)]
    assert [str(case) for case in found if case.kind == "down"] == ["down S=4096", "down S=8192"]
    assert len(found) == 14
