"""scripts/bench_attention.py: its arguments, and a run on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_attention
from attention_benchmark.arguments import (
    core_cases,
    layer_cases,
    parse_arguments,
    require_device,
)
from attention_benchmark.cases import CoreCase, LayerCase
from attention_benchmark.report import Report
from tests.support import needs
from tests.support.attention_rows import TINY


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, str]:
    """A real run on the CPU: its folder and its output."""
    folder = tmp_path_factory.mktemp("attention")
    done = subprocess.run(
        [sys.executable, bench_attention.__file__, str(folder), *TINY],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GIT_COMMIT": "abc"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_a_run_measures_ours_in_both_suites(measured):
    folder, output = measured
    report = Report.read(folder / "attention.json")
    layers = [(r.case.recompute, r.case.layout) for r in report.measured("layer")]
    assert layers == [(True, "sbhd"), (True, "thd"), (False, "sbhd"), (False, "thd")]
    assert {row.suite for row in report.rows[8:]} == {"core"}
    assert {row.ran for row in report.measured("layer")} == {"expanded, reference"}
    cores = {(row.case.implementation, row.case.form) for row in report.measured("core")}
    assert cores == {("ours, reference", "expanded"), ("ours, reference", "absorbed")}
    for row in [*report.measured("layer"), *report.measured("core")]:
        assert 0 < row.forward.least <= row.forward.median <= row.forward.most
        assert row.step.median > row.backward.median > 0
        assert not row.error
    last = json.loads(output.splitlines()[-1])
    assert last[0]["commit"] == "abc" and len(last[0]["layer"]) == 4
    assert {"triton", "flash-attn-4", "nvidia-cutlass-dsl"} < {*report.environment["versions"]}
    assert last[0]["not_measured"] == sum(bool(row.error) for row in report.rows)


def test_a_run_says_why_others_were_not_measured(measured):
    folder, output = measured
    rows = Report.read(folder / "attention.json").rows
    why = {row.case.implementation: row.error for row in rows if row.error}
    assert "needs a GPU" in why["ours, cudnn"]
    assert why["torch, cudnn"] == "this device has no such kernel"
    assert "same last dimension" in why["torch, flash"]
    assert why["megatron"] == (
        "Megatron's standard MLA needs transformer-engine, not installed here"
    )
    for module in ("transformer_engine", "flash_attn_interface", "flash_attn"):
        assert any(f"No module named '{module}'" in error for error in why.values())
    assert "Not measured:" in output and "Layer" in output


def test_a_run_is_rendered_again(measured, tmp_path, capsys):
    folder, output = measured
    again = tmp_path / "again"
    source = str(folder / "attention.json")
    assert bench_attention.main([str(again), "--render", source]) == 0
    for name in ("attention.md", "attention.png"):
        assert (again / name).stat().st_size == (folder / name).stat().st_size
    assert capsys.readouterr().out.splitlines()[-1] == output.splitlines()[-1]


def test_what_matters_comes_first_and_smaller_ones_before_larger():
    args = parse_arguments(["out", "--heads", "128,16", "--seq-lens", "2k,1k"], "")
    layers = layer_cases(args)
    assert len(layers) == 2 * 2 * 2 * 4
    assert [c.tokens for c in layers] == 2 * (8 * [1024] + 8 * [2048])
    assert layers[:2] == [
        LayerCase("megatron", True, 16, 1024, "sbhd"),
        LayerCase("ours", True, 16, 1024, "sbhd"),
    ]
    compared = {("megatron", True), ("ours", True)}
    assert {(c.implementation, c.recompute) for c in layers[:16]} == compared
    cores = core_cases(args, ["a", "b"])
    assert len(cores) == 2 * 2 * 2 * 2 and cores[1] == CoreCase("b", "expanded", 16, 1024)
    only = core_cases(parse_arguments(["out", "--only", "b"], ""), ["a", "b"])
    assert {case.implementation for case in only} == {"b"} and len(only) == len(cores) // 2
    assert not core_cases(parse_arguments(["out", "--suite", "layer"], ""), ["a"])
    assert not layer_cases(parse_arguments(["out", "--suite", "core"], ""))


def test_quick_is_what_is_not_given():
    quick = parse_arguments(["out", "--quick"], "")
    assert (quick.seq_lens, quick.seconds_per_row) == ([4096, 8192], 0.1)
    given = parse_arguments(["out", "--quick", "--seq-lens", "1k", "--seconds-per-row", "1"], "")
    assert (given.seq_lens, given.seconds_per_row) == ([1024], 1.0)
    whole = parse_arguments(["out"], "")
    assert (whole.seconds_per_row, whole.time_limit) == (0.5, 240.0)
    assert max(case.tokens for case in layer_cases(whole)) == 64 * 1024


@pytest.mark.parametrize(
    "options, message",
    (
        (["--seq-lens", "16q"], "argument --seq-lens: expected a whole number above 0"),
        (["--heads", "0"], "argument --heads: expected a whole number above 0"),
        (["--layouts", "bshd"], "expected some of sbhd, thd"),
        (["--suite", "none"], "argument --suite: invalid choice"),
        (["--form", "other"], "argument --form: invalid choice"),
        (["--backend", "other"], "argument --backend: invalid choice"),
        (["--seconds-per-row", "nan"], "expected a number of seconds above 0, got 'nan'"),
        (["--rope-fusion"], "--rope-fusion needs --rope-type yarn"),
        (["--render", "/nowhere.json"], "--render must be JSON that this script wrote"),
    ),
)
def test_wrong_input(options, message, tmp_path, capsys):
    assert bench_attention.main([str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@needs.no_gpu
def test_a_gpu_that_is_not_there(tmp_path, capsys):
    assert bench_attention.main([str(tmp_path / "out"), "--device", "cuda"]) == 2
    expected = "bench_attention.py: error: --device cuda needs a GPU, and there is none; give "
    expected += "--device cpu\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "out").exists()


def test_device():
    args = SimpleNamespace(device=None)
    assert require_device(args, True) == "cuda" and require_device(args, False) == "cpu"
