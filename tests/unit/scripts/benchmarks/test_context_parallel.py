"""scripts/benchmarks/context_parallel*.py: their cases, and like compared with like."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks import context_parallel_compute as compute
from benchmarks.context_parallel import CPBenchmark, CPReport, RingCase, Row
from benchmarks.decode_context_parallel import Row as SharedRow
from benchmarks.decode_context_parallel import SharedCase, SharedReport
from benchmarks.kit import Times, layers
from benchmarks.kit.works import Measured

OURS = Row(
    case=RingCase("ours", "all_gather", "expanded", 16384, 128, "sbhd", 1, "none"),
    cp_size=2,
    forward_seconds=[0.02, 0.01, 0.06],
    step_seconds=[0.06, 0.05, 0.1],
    kept_bytes=2**29,
    peak_bytes=2**31,
    forward_sent_bytes=8192 * 1152,
    backward_sent_bytes=8192 * 2304,
    traffic={"forward": [], "backward": []},
    forward_overlap=0.5,
    ran="expanded, cudnn",
)
MEGATRON = dataclasses.replace(
    OURS,
    case=RingCase("megatron", "p2p", "expanded", 16384, 128, "sbhd", 1, "none"),
    step_seconds=[0.04],
    kept_bytes=2**30,
    forward_sent_bytes=8192 * 80000,
    backward_sent_bytes=8192 * 265600,
    forward_overlap=None,
    ran="",
)
FAILED = Row(case=MEGATRON.case, cp_size=2, error="rank 1: OutOfMemoryError: CUDA out\nof memory")


def cases(argv: list[str], benchmark=CPBenchmark) -> list:
    return benchmark.cases(SimpleNamespace(args=benchmark.parse(argv)))


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def report(*rows: Row) -> CPReport:
    return CPReport({}, list(rows))


def test_cases():
    argv = ["out", "--sizes", "1k,16", "--heads", "2", "--layouts", "sbhd,thd", "--documents", "2"]
    found = cases(argv)
    assert [case.tokens for case in found] == [16] * 6 + [1024] * 6
    assert [(c.implementation, c.cp_comm_type) for c in found[:3]] == [
        ("ours", "all_gather"),
        ("ours", "p2p"),
        ("megatron", "p2p"),
    ]
    assert [(c.layout, c.documents) for c in found[:6]] == [("sbhd", 1)] * 3 + [("thd", 2)] * 3
    assert {case.recompute for case in found} == {"none"}


def test_both_layers_recompute():
    argv = ["out", "--sizes", "16", "--heads", "2", "--cp-comm-types", "p2p"]
    found = cases([*argv, "--recompute", "none,mla_up_proj"])
    expected = [(i, r) for r in ("none", "mla_up_proj") for i in ("ours", "megatron")]
    assert [(case.implementation, case.recompute) for case in found] == expected
    assert str(found[3]) == "megatron p2p expanded recompute mla_up_proj sbhd S=16 n=2"


def test_sizes_that_do_not_divide(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = ["--layouts", "sbhd,thd", "--documents", "3", "--sizes", "16,48"]
    assert CPBenchmark.main(["out", *options]) == 2
    expected = "--sizes: 16 tokens do not divide into 3 document(s) of 2 x 4 chunks"
    assert f"{expected}; give multiples of 24" in capsys.readouterr().err


@pytest.mark.parametrize("implementation", ["ours", "megatron"])
@pytest.mark.parametrize(("recompute", "expected"), [("none", None), ("mla_up_proj",) * 2])
def test_the_layer_is_told_what_its_case_recomputes(
    implementation, recompute, expected, monkeypatch
):
    """Also Megatron's, which no machine without TransformerEngine builds."""
    told = []

    def layer_config(args, processes, *, recompute, **options):
        told.append((recompute, options["cp_comm_type"]))
        raise InterruptedError

    monkeypatch.setattr(layers, "layer_config", layer_config)
    case = RingCase(implementation, "p2p", "expanded", 16, 2, "sbhd", 1, recompute)
    with pytest.raises(InterruptedError):
        benchmark = SimpleNamespace(
            args=CPBenchmark.parse(["out"]), processes=SimpleNamespace(size=2)
        )
        CPBenchmark.build(benchmark, case)
    assert told == [(expected, "p2p")]


class TestReport:
    def test_ratios(self):
        found = report(OURS, MEGATRON)
        assert found.ratios(OURS) == {"bytes": 0.01, "time": 1.5, "kept": 0.5}

    def test_bytes_per_token_are_for_each_other_rank(self):
        four = dataclasses.replace(OURS, cp_size=4, forward_sent_bytes=4096 * 3 * 1152)
        assert four.bytes_per_token["forward"] == OURS.bytes_per_token["forward"] == 1152
        found = report(OURS, MEGATRON)
        assert found.peer(OURS) is MEGATRON
        assert found.peer(four) is None

    def test_recomputed_is_compared_with_recomputed(self):
        """Otherwise memory saved by recomputation looks like the layer's own doing."""

        def recomputed(row, **figures):
            case = dataclasses.replace(row.case, recompute="mla_up_proj")
            return dataclasses.replace(row, case=case, **figures)

        ours, theirs = recomputed(OURS, kept_bytes=2**28), recomputed(MEGATRON, kept_bytes=2**28)
        found = report(OURS, MEGATRON, ours, theirs)
        assert found.peer(ours) is theirs and found.peer(OURS) is MEGATRON
        assert report(ours, MEGATRON).peer(ours) is None
        assert (found.ratios(OURS)["kept"], found.ratios(ours)["kept"]) == (0.5, 1.0)

    def test_failed_cases_are_no_peers(self):
        assert report(OURS, FAILED).ratios(OURS) == {}

    def test_files_from_before_it_was_recorded_what_ran(self, tmp_path):
        path = tmp_path / "a.json"
        report(OURS).write(path)
        content = json.loads(path.read_text())
        assert content["rows"][0]["step_ms"] == {"median": 60, "min": 50, "max": 100}
        assert content["rows"][0]["forward_bytes_per_token"] == 1152
        assert content["rows"][0].pop("ran") == "expanded, cudnn"
        path.write_text(json.dumps(content))
        assert CPReport.read(path).rows == [dataclasses.replace(OURS, ran="")]


class TestCompute:
    """One rank's computation."""

    def test_cases(self):
        argv = ["--heads", "16", "--seq-lens", "8k,4k", "--cp-sizes", "2,4"]
        found = cases(argv, compute.ComputeBenchmark)
        first, last = compute.RankCase(2, "sbhd", 4096, 16), compute.RankCase(4, "thd", 8192, 16)
        assert found[0] == first and found[-1] == last and len(found) == 8
        assert found[1].lengths == [1280, 256, 1024, 512, 1024]

    def test_ratio(self):
        """Of the longer one of host and GPU, whose copies do not count."""

        def work(name: str, step: float, host: float) -> Measured:
            of = [Times(x, x, x, 1) for x in (step / 3, step, step, host)]
            return Measured(name, "", of[0], of[1], of[2], of[3])

        works = [work("p2p:cudnn", 2e-3, 6e-3), work("megatron", 4e-3, 1e-3)]
        messages = {"p2p:cudnn": (2**20, 1e-4), "megatron": (2**30, 1e-3)}
        row = compute.Row(case=compute.RankCase(2, "sbhd", 64, 2), works=works, messages=messages)
        report = compute.ComputeReport({}, [row])
        assert report.figures(row)["p2p:cudnn ratio"] == 2
        assert "p2p:cudnn 6.0 ms (2.00), megatron 3.0 ms" in report.line(row)


def test_table_of_decode():
    """The fastest of those that ran, and the rate of as many requests as the memory of tp holds."""
    seconds = {("tp", 4): 1.0, ("tp", 8): 1.0, ("shared", 8): 0.8, ("own", 8): 0.5}
    rows = [
        SharedRow(case=SharedCase(layout, 1024, batch), seconds=s, cache_bytes=1, cache_tokens=1)
        for (layout, batch), s in seconds.items()
    ]
    rows.append(SharedRow(case=SharedCase("shared", 1024, 4), error="RuntimeError: no"))
    _, _, four, eight = SharedReport({"ranks": 2}, rows).table()
    assert four == "| 1k | 4 | 4 |  |  | tp |  |"
    assert eight == "| 1k | 8 | 8 | 10 | 16 | own | 4 |"
