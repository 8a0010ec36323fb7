"""What all benchmarks share: timing, files, tables, plots, processes, descriptions."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from argparse import Namespace
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from benchmarks import kit
from benchmarks.kit import provenance, run, timing
from benchmarks.kit.arguments import parse_sizes, use_device
from benchmarks.kit.overlap import covered_fraction, kernels, merged
from benchmarks.kit.plot import Panel, collected, draw
from benchmarks.kit.processes import CaseError, Device, Processes
from benchmarks.kit.report import Refused, Report, Times, not_measured, reason
from benchmarks.kit.tables import shortened, tokens_text
from benchmarks.kit.works import Work, attempts, measure_together
from tests.support.fake_packages import transformer_engine as fake_transformer_engine

ENVIRONMENT = {
    "date": "2026-01-01",
    "command": "python it.py",
    "commit": "abc",
    "device": "a device",
    "dtype": "bfloat16",
    "dims": {"kv-lora-rank": 512},
    "link": 55.5e9,
    "versions": {"torch": "2"},
}


@dataclass(frozen=True)
class Case:
    name: str


@dataclass(frozen=True)
class Row:
    case: Case
    times: Times | None = None
    samples: list[Times] = dataclasses.field(default_factory=list)
    ran: str = ""
    error: str = ""


class SomeReport(Report):
    row = Row

    def figures(self, row):
        return {"ms": 1e3 * row.times.median}

    @classmethod
    def notes(cls, reports):
        return ["a note", ""]

    @classmethod
    def panels(cls, reports):
        panels = collected([("a", "good", 1024, 3), ("b", "good", 2048, 4)], "tokens")
        return [*panels, Panel("c", "iteration", {"x": [(1, 2), (2, 1)]}, sizes=False, marker="")]


class SomeBenchmark(run.Benchmark):
    report = SomeReport
    options = kit.declare("render json", heads="128", seed=1, dims=kit.DIMS)
    quick = "--seed 2"
    recorded = ("dims", "seed")

    def prepare(self):
        pass


TIMES = Times(0.0123456, 0.01, 0.02, 3)
GOOD = Row(Case("good"), TIMES, [TIMES], "expanded, cudnn")
BAD = [Row(Case(f"bad {n}"), error="too wide\nfor flash") for n in range(6)]


class TestReport:
    def test_json_keeps_everything(self, tmp_path):
        path = tmp_path / "new" / "a.json"
        SomeReport(ENVIRONMENT, [GOOD, *BAD]).write(path)
        assert SomeReport.read(path) == SomeReport(ENVIRONMENT, [GOOD, *BAD])
        assert [file.name for file in path.parent.iterdir()] == ["a.json"]

    def test_fields_that_are_missing_and_values_that_are_no_fields(self, tmp_path):
        path = tmp_path / "a.json"
        row = {"case": {"name": "old"}, "rate": 3}
        path.write_text(json.dumps({"environment": {}, "rows": [row]}))
        assert SomeReport.read(path).rows == [Row(Case("old"))]

    @pytest.mark.parametrize(
        "content",
        ("{", "[]", '{"environment": {}, "rows": [{}]}',
         '{"environment": {}, "rows": [{"case": {"of": "another benchmark"}}]}'),
    )  # fmt: skip
    def test_another_file(self, content, tmp_path):
        path = tmp_path / "other.json"
        path.write_text(content)
        with pytest.raises(ValueError, match=f"--render must be JSON that this script .*{path}"):
            SomeReport.read(path)

    def test_errors_are_grouped_by_why(self):
        names = "; ".join(str(row.case) for row in BAD[:4])
        found = not_measured([SomeReport(ENVIRONMENT, [GOOD, *BAD])])
        assert found.splitlines()[-1] == f"- too wide for flash: {names}; 2 more"
        assert not not_measured([SomeReport(ENVIRONMENT, [GOOD])])
        assert reason(Refused("as it says")) == "as it says"
        assert reason(KeyError("x")) == "KeyError: 'x'"

    @pytest.mark.parametrize("plotted", [True, False])
    def test_results(self, plotted, tmp_path, capsys, monkeypatch):
        if not plotted:
            monkeypatch.setitem(sys.modules, "matplotlib", None)
        png = tmp_path / "new" / "it.png"
        run.publish([SomeReport(ENVIRONMENT, [GOOD, BAD[0]])], Namespace(plot=png))
        output = capsys.readouterr().out
        assert "a note" in output and "Not measured:" in output
        assert png.exists() == plotted
        assert ("No plot: matplotlib is missing" in output) != plotted
        [last] = json.loads(output.splitlines()[-1])
        assert last["rows"][0] == {"name": "good", "ms": pytest.approx(12.3456)}
        assert last["rows"][1]["error"].startswith("too wide")

    def test_former_results(self, tmp_path, capsys):
        file = tmp_path / "a.json"
        SomeReport(ENVIRONMENT, [GOOD, BAD[0]]).write(file)
        assert SomeBenchmark.main(["--render", str(file)]) == 0
        about, row = capsys.readouterr().out.splitlines()[1:3]
        assert about.startswith("Measured on 2026-01-01 by `python it.py` at abc: a device, bf")
        assert about.endswith("; kv-lora-rank 512; link 5.55e+10; torch 2.")
        assert row == f"{GOOD.case} (expanded, cudnn): ms 12.35"

    def test_quick_options_are_tiny_and_others_take_precedence(self):
        args = SomeBenchmark.parse(["--quick", "--kv-lora-rank", "24"])
        assert args.heads == [2] and args.seed == 2
        assert kit.dims_of(args)["kv-lora-rank"] == 24 and args.hidden_size == 64
        assert SomeBenchmark(args).about() == {"dims": kit.dims_of(args), "seed": 2}
        assert SomeBenchmark.parse([]).heads == [128]

    def test_nothing_to_draw(self, tmp_path):
        assert not draw([], tmp_path / "a.png")


def test_numbers_as_people_read_and_write_them():
    assert parse_sizes("16k, 2M,100,16384") == [16384, 2 * 1024**2, 100]
    assert tokens_text(16384) == "16k" and tokens_text(1000) == "1000"
    assert shortened("a\n b " + "c" * 9, 9) == "a b cc..."


def test_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", mock.Mock(return_value=available))
        assert use_device(None) == expected and os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    with pytest.raises(ValueError, match="--device cuda needs a GPU, and there is none"):
        use_device("cuda")
    assert use_device("cpu") == "cpu" and os.environ["CUDA_VISIBLE_DEVICES"] == ""


class TestTiming:
    def test_repetitions(self):
        assert timing.repetitions(11, 10) == 1
        assert timing.repetitions(9, 10) == 3
        assert timing.repetitions(1, 10) == 10
        assert timing.repetitions(1e-9, 10) == 100

    def test_forward_and_backward_alternate(self):
        calls = []
        repeated = timing.Repeated(
            lambda: calls.append("f"),
            lambda _: calls.append("b"),
            lambda: calls.append("z"),
            on_gpu=False,
        )
        forward, backward, step = repeated.times(1.0, 3.5)
        assert "".join(calls) == "fbz" * 3
        assert forward.repetitions == backward.repetitions == step.repetitions == 3
        assert step.median >= max(forward.median, backward.median)

    def test_ceilings(self):
        found = timing.ceilings(on_gpu=False)
        assert found["matmul_tflops"] > 0 and found["copy_tbps"] > 0


class TestOverlap:
    @pytest.mark.parametrize(
        "these, others, fraction",
        (
            ([], [(0, 1)], None),
            ([(0, 10)], [], 0),
            ([(0, 10)], [(10, 20)], 0),
            ([(0, 10)], [(-5, 20)], 1),
            ([(0, 10)], [(2, 4), (3, 5), (9, 30)], 0.4),
            ([(0, 4), (2, 10), (20, 30)], [(8, 25)], 0.35),
            ([(20, 30), (0, 10)], [(26, 27), (1, 2), (3, 21), (24, 25)], 0.55),
        ),
    )
    def test_covered_fraction(self, these, others, fraction):
        assert covered_fraction(these, others) == (
            None if fraction is None else pytest.approx(fraction)
        )

    def test_merged(self):
        assert merged([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]
        assert merged([(0, 9), (1, 2), (10, 11)]) == [(0, 9), (10, 11)]

    def test_kernels_of_a_trace(self):
        """Copies and the ranges that the profiler draws around collectives are no kernels."""
        events = [
            {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(a)", "ts": 5, "dur": 2},
            {"cat": "kernel", "name": "sm90_gemm", "ts": 1.5, "dur": 3},
            {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 5, "dur": 2},
            {"cat": "gpu_user_annotation", "name": "nccl:_all_gather_base", "ts": 5, "dur": 2},
            {"cat": "kernel", "name": "at::cuda::spin_kernel(long)", "ts": 0, "dur": 1},
            {"ph": "M", "name": "process_name"},
        ]
        assert kernels(events) == ([(5, 7)], [(1.5, 4.5)])


def test_an_error_of_another_rank_is_everyones():
    class Alone(Processes):
        def __init__(self):
            self.of_others = ""

        def meet(self):
            pass

        synchronize = meet

        def first_error(self, error):
            return (error and f"rank 0: {error}") or self.of_others

    processes = Alone()
    assert processes.together(lambda: 3) == 3
    with pytest.raises(CaseError, match="rank 0: ValueError: why"):
        processes.together(lambda: (_ for _ in ()).throw(ValueError("why")))
    processes.of_others = "rank 1: memory"
    with pytest.raises(CaseError, match="rank 1: memory"):
        processes.together(lambda: 3)


class TestProvenance:
    """The cuDNN of a figure is the one that ran, not the one that PyTorch came with."""

    @pytest.mark.parametrize(("number", "text"), [(91400, "9.14.0"), (91900, "9.19.0")])
    def test_transformer_engine_is_asked(self, number, text, monkeypatch):
        fake_transformer_engine.install(monkeypatch, cudnn=number)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92001)
        found = provenance.attention_versions(on_gpu=True)
        assert found["cudnn of transformer-engine"] == text
        assert found["cudnn of torch"] == "9.20.1"
        assert "cudnn of torch" not in provenance.attention_versions(on_gpu=False)

    def test_a_broken_installation(self, monkeypatch):
        def broken(name):
            raise RuntimeError("the core library is missing")

        monkeypatch.setattr(provenance.importlib, "import_module", broken)
        assert provenance.cudnn_of_transformer_engine() == "cannot be imported (RuntimeError)"

    def test_torch_runs_another_than_it_knows(self, monkeypatch):
        def refuses():
            raise RuntimeError(
                "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found "
                "runtime version (9, 14, 0). PyTorch already comes bundled with cuDNN."
            )

        monkeypatch.setattr(torch.backends.cudnn, "version", refuses)
        expected = "9.14.0 (PyTorch was compiled against 9.19.0)"
        assert provenance.cudnn_of_torch() == expected


def test_works_take_turns():
    """And what cannot run leaves the others as they are."""
    order = []
    a, b = (timing.Repeated(lambda name=name: order.append(name), on_gpu=False) for name in "ab")
    assert [len(steps) for steps in timing.in_turns([a, b], 4)] == [4, 4]
    # Three to see how long the host takes, then there and back.
    assert order == list("ab" * 3 + "abba" * 2)


def test_a_work_that_fails_is_an_error_of_its_own():
    def work(name: str, value: float, **more) -> Work:
        return Work(lambda: torch.full((3,), value), outputs=lambda x: (x,), name=name, **more)

    def fail() -> None:
        raise ValueError("no such thing")

    works = [
        *attempts({"unbuilt": fail, "broken": lambda: Work(fail)}),
        work("first", 2.0),
        work("second", 3.0, traffic=(8, 4)),
    ]
    unbuilt, broken, first, second = measure_together(works, Device(1), 0.001)
    assert unbuilt.error == broken.error == "ValueError: no such thing"
    assert first.difference == 0 and second.difference == pytest.approx(0.5)
    numbers = second.numbers()
    assert numbers["forward_tbps"] * numbers["forward_us"] == pytest.approx(8e-6)
    assert "forward_tbps" not in first.numbers()
