"""What all benchmarks share: timing, files, tables, plots, processes, commands, descriptions."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import kit
from benchmarks.kit import command, processes, provenance, run, timing
from benchmarks.kit.arguments import parse_sizes, use_device
from benchmarks.kit.command import run_to_log
from benchmarks.kit.processes import CaseError, Processes
from benchmarks.kit.report import Refused, Report, Times, not_measured, reason
from benchmarks.kit.tables import shortened, tokens_text
from tests.support.fake_packages import transformer_engine as fake_transformer_engine

SCRIPTS = Path(command.__file__).parents[2]
MB = 10**6
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
class Case(kit.Case):
    text = "{0.implementation} S={0.tokens}"
    implementation: str
    tokens: int = 8


@dataclass(frozen=True, kw_only=True)
class Row(kit.RanRow):
    samples: list[Times] = dataclasses.field(default_factory=list)


class SomeReport(Report):
    row, case = Row, Case
    plotted = (("{0.tokens} tokens", "ms", "tokens"),)

    def figures(self, row):
        return {"ms": 1e3 * row.times.median, **row.more}

    @classmethod
    def notes(cls, reports):
        return ["a note", ""]


class SomeBenchmark(run.InTurns):
    """Calls that sleep, or raise what their name says."""

    report = SomeReport
    options = kit.declare(
        "render json only heads=128 seconds_per_row=0.001 time_limit=60 seed=1", dims=kit.DIMS
    )
    quick = "--seed 2"
    recorded = ("dims", "seed")

    def prepare(self):
        self.order = []

    def cases(self):
        return [Case(name, n) for n in (1, 2) for name in ("a", "fails", "b")]

    def begin(self, case):
        self.now.doubled = 2 * case.tokens

    def work(self, case):
        if case.implementation == "fails":
            raise ValueError("no")
        if case.implementation == "gone":
            raise torch.AcceleratorError("CUDA error")
        call = lambda: self.order.append(case.implementation)  # noqa: E731
        return timing.Repeated(call, on_gpu=False), {"ran": str(self.now.doubled)}

    def count(self, works):
        return 4

    def repeated(self, seconds):
        return {case: {"more": {"turns": len(own)}} for case, own in seconds.items()}


TIMES = Times(0.0123456, 0.01, 0.02, 3)
GOOD = Row(case=Case("good"), times=TIMES, samples=[TIMES], ran="expanded, cudnn")
BAD = [Row(case=Case(f"bad {n}"), error="too wide\nfor flash") for n in range(6)]


class TestReport:
    def test_json_keeps_everything(self, tmp_path):
        path = tmp_path / "new" / "a.json"
        SomeReport(ENVIRONMENT, [GOOD, *BAD]).write(path)
        assert SomeReport.read(path) == SomeReport(ENVIRONMENT, [GOOD, *BAD])
        assert [file.name for file in path.parent.iterdir()] == ["a.json"]

    def test_fields_that_are_missing_and_values_that_are_no_fields(self, tmp_path):
        path = tmp_path / "a.json"
        row = {"case": {"implementation": "old"}, "rate": 3}
        path.write_text(json.dumps({"environment": {}, "rows": [row]}))
        assert SomeReport.read(path).rows == [Row(case=Case("old"))]

    @pytest.mark.parametrize(
        "content",
        [
            *("{", "[]", '{"environment": {}, "rows": [{}]}'),
            '{"environment": {}, "rows": [{"case": {"of": "another benchmark"}}]}',
        ],
    )
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
        assert last["rows"][0] == {
            "implementation": "good",
            "tokens": 8,
            "ms": pytest.approx(12.3456),
        }
        assert last["rows"][1]["error"].startswith("too wide")

    def test_former_results(self, tmp_path, capsys):
        file = tmp_path / "a.json"
        SomeReport(ENVIRONMENT, [GOOD, BAD[0]]).write(file)
        assert SomeBenchmark.main(["--render", str(file)]) == 0
        about, row = capsys.readouterr().out.splitlines()[1:3]
        assert about.startswith("Measured on 2026-01-01 by `python it.py` at abc: a device, bf")
        assert about.endswith("; kv-lora-rank 512; link 5.55e+10; torch 2.")
        assert row == "good S=8 (expanded, cudnn): ms 12.35"


class TestBenchmark:
    def made(self, *argv: str) -> SomeBenchmark:
        return SomeBenchmark(SomeBenchmark.parse(argv))

    def test_quick_options_are_tiny_and_others_take_precedence(self):
        made = self.made("--quick", "--kv-lora-rank", "24")
        assert made.args.heads == [2] and made.args.seed == 2
        assert kit.dims_of(made.args)["kv-lora-rank"] == 24 and made.args.hidden_size == 64
        assert made.about() == {"dims": kit.dims_of(made.args), "seed": 2}
        assert self.made().args.heads == [128]

    def test_cases_of_an_input_take_turns(self):
        """What cannot run leaves the others as they are."""
        made = self.made()
        rows = list(made.rows())
        assert [str(row.case) for row in rows] == list(map(str, made.cases()))
        assert [row.error for row in rows] == ["", "ValueError: no", ""] * 2
        assert [row.ran for row in rows] == ["2", "", "2", "4", "", "4"]
        assert all(row.more == {"turns": 4} and row.times for row in rows if not row.error)
        # Three to see how long the host takes, then there and back.
        assert made.order == list("ab" * 3 + "abba" * 2) * 2

    def test_some(self):
        assert {row.case.tokens for row in self.made("--only", "S=2").rows()} == {2}

    def test_late_cases_are_left_out(self):
        made = self.made()
        made.args.begin -= 61
        assert {row.error for row in made.rows()} == {"left out: 60 s are over (--time-limit)"}

    def test_a_device_that_is_lost_ends_no_script(self, monkeypatch):
        made = self.made()
        monkeypatch.setattr(torch.cuda, "empty_cache", mock.Mock(side_effect=RuntimeError("gone")))
        made.cases = lambda: [Case("a"), Case("gone"), Case("b", 9)]
        first, second, third = made.rows()
        assert "CUDA error" in first.error and "CUDA error" in second.error
        assert third.error == "left out: a S=8 took the device away from this process"


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


def test_timing():
    counts = [timing.repetitions(seconds, 10) for seconds in (11, 9, 1, 1e-9)]
    assert counts == [1, 3, 10, 100]
    calls = []
    steps = (lambda: calls.append("f"), lambda _: calls.append("b"), lambda: calls.append("z"))
    forward, backward, step = timing.Repeated(*steps, on_gpu=False).times(1.0, 3.5)
    assert "".join(calls) == "fbz" * 3
    assert forward.repetitions == backward.repetitions == step.repetitions == 3
    assert step.median >= max(forward.median, backward.median)
    assert all(rate > 0 for rate in timing.ceilings(on_gpu=False).values())


def test_an_error_of_another_rank_is_everyones(monkeypatch):
    made = Processes.__new__(Processes)
    monkeypatch.setattr(processes.dist, "barrier", lambda group: None)
    made.device, made._host_group, of_others = torch.device("cpu"), None, ""
    made.first_error = lambda error: (error and f"rank 0: {error}") or of_others
    assert made.together(lambda: 3) == 3
    with pytest.raises(CaseError, match="rank 0: ValueError: why"):
        made.together(lambda: (_ for _ in ()).throw(ValueError("why")))
    of_others = "rank 1: memory"
    with pytest.raises(CaseError, match="rank 1: memory"):
        made.together(lambda: 3)


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
        broken = mock.Mock(side_effect=RuntimeError("the core library is missing"))
        monkeypatch.setattr(provenance.importlib, "import_module", broken)
        assert provenance.cudnn_of_transformer_engine() == "cannot be imported (RuntimeError)"

    def test_torch_runs_another_than_it_knows(self, monkeypatch):
        error = RuntimeError(
            "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found "
            "runtime version (9, 14, 0). PyTorch already comes bundled with cuDNN."
        )
        monkeypatch.setattr(torch.backends.cudnn, "version", mock.Mock(side_effect=error))
        expected = "9.14.0 (PyTorch was compiled against 9.19.0)"
        assert provenance.cudnn_of_torch() == expected


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_of_commands(tmp_path):
    """All of it is in the log; a run that takes too long is ended."""
    log, program = tmp_path / "a.log", "import sys, time; print('begun', flush=True); "
    assert run_to_log(python(program + "raise KeyError('why')"), log, 60.0) == 1
    assert log.read_text().startswith("begun\nTraceback")
    assert run_to_log(python(program + "time.sleep(60)"), log, 0.5) is None
    assert run_to_log(python(program), log, 60.0) == 0
