"""scripts/bench_context_parallel.py: its arguments and its reports."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_context_parallel
from context_parallel_benchmark.arguments import Case, cases, parse_arguments, parse_sizes
from context_parallel_benchmark.report import Report, errors, markdown, table
from context_parallel_benchmark.row import Row

ENVIRONMENT = {
    "date": "2026-01-01",
    "command": "torchrun",
    "commit": "abc",
    "device": "a device",
    "processes": 2,
    "backend": "nccl",
    "dtype": "bfloat16",
    "dims": {"kv-lora-rank": 512},
    "rope_type": "rope",
    "versions": {"torch": "2"},
}
OURS = Row(
    case=Case("ours", "all_gather", "expanded", 16384, 128, "sbhd", 1, "none"),
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
    case=Case("megatron", "p2p", "expanded", 16384, 128, "sbhd", 1, "none"),
    step_seconds=[0.04],
    kept_bytes=2**30,
    forward_sent_bytes=8192 * 80000,
    backward_sent_bytes=8192 * 265600,
    forward_overlap=None,
    ran="",
)
FAILED = Row(case=MEGATRON.case, cp_size=2, error="rank 1: OutOfMemoryError: CUDA out\nof memory")


def test_cases():
    argv = ["out", "--sizes", "1k,16", "--heads", "2", "--layouts", "sbhd,thd", "--documents", "2"]
    found = cases(parse_arguments(argv, ""), 2)
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
    found = cases(parse_arguments([*argv, "--recompute", "none,mla_up_proj"], ""), 2)
    expected = [(i, r) for r in ("none", "mla_up_proj") for i in ("ours", "megatron")]
    assert [(case.implementation, case.recompute) for case in found] == expected
    assert str(found[3]) == "megatron p2p expanded recompute mla_up_proj sbhd S=16 n=2"


def test_sizes():
    assert parse_sizes("16k, 2M,100,16384") == [16384, 2 * 1024**2, 100]


@pytest.mark.parametrize(
    "options, message",
    (
        ([], "context parallelism needs 2 or more processes, got 1"),
        (["--sizes", "16q"], "argument --sizes: expected a whole number above 0"),
        (["--heads", "0"], "argument --heads: expected a whole number above 0, got '0'"),
        (["--layouts", "bshd"], "expected some of sbhd, thd"),
        (["--implementations", "theirs"], "expected some of ours, megatron"),
        (["--cp-comm-types", "a2a"], "expected some of all_gather, p2p"),
        (["--form", "other"], "argument --form: invalid choice"),
        (["--recompute", "core_attn"], "expected some of none, mla_up_proj"),
        (["--seconds-per-row", "nan"], "expected a number of seconds above 0, got 'nan'"),
        (["--render", "/nowhere.json"], "--render must be JSON that this script wrote"),
    ),
)
def test_wrong_input(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench_context_parallel.main([str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sizes_that_do_not_divide(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = ["--layouts", "sbhd,thd", "--documents", "3", "--sizes", "16,48"]
    assert bench_context_parallel.main(["out", *options]) == 2
    expected = "--sizes: 16 tokens do not divide into 3 document(s) of 2 x 4 chunks"
    assert f"{expected}; give multiples of 24" in capsys.readouterr().err


def test_table():
    report = Report(ENVIRONMENT, [OURS, MEGATRON])
    assert table([report]).splitlines()[2] == (
        "| 2 | sbhd | 16k | 128 | ours | - | all_gather | expanded | expanded, cudnn | "
        "20.0 (10.0 - 60.0) ms | 60.0 (50.0 - 100.0) ms | 0.50 GiB | 2.00 GiB | "
        "1,152 + 2,304 | 0.010 | 1.50 | 0.50 | 50 %, - |"
    )
    text = markdown([report])
    assert "2 ranks, measured on 2026-01-01 by `torchrun` at abc: a device" in text


def test_bytes_per_token_are_for_each_other_rank():
    four = dataclasses.replace(OURS, cp_size=4, forward_sent_bytes=4096 * 3 * 1152)
    assert four.forward_bytes_per_token == OURS.forward_bytes_per_token == 1152
    peers = Report(ENVIRONMENT, [OURS, MEGATRON])
    assert peers.peer(OURS) is MEGATRON
    assert peers.peer(four) is None


def test_recomputed_is_compared_with_recomputed():
    """Otherwise memory saved by recomputation looks like the layer's own doing."""

    def recomputed(row, **figures):
        case = dataclasses.replace(row.case, recompute="mla_up_proj")
        return dataclasses.replace(row, case=case, **figures)

    ours, theirs = recomputed(OURS, kept_bytes=2**28), recomputed(MEGATRON, kept_bytes=2**28)
    report = Report(ENVIRONMENT, [OURS, MEGATRON, ours, theirs])
    assert report.peer(ours) is theirs and report.peer(OURS) is MEGATRON
    assert Report(ENVIRONMENT, [ours, MEGATRON]).peer(ours) is None
    lines = table([report]).splitlines()
    assert "| 0.010 | 1.50 | 0.50 |" in lines[2] and "| 0.010 | 1.50 | 1.00 |" in lines[4]
    assert "| ours | mla_up_proj | all_gather |" in lines[4]


def test_failed_cases_are_named_and_in_no_table():
    failed = [FAILED, dataclasses.replace(FAILED, cp_size=4)]
    report = Report(ENVIRONMENT, [OURS, *failed])
    assert len(table([report]).splitlines()) == 3
    case = "megatron p2p expanded sbhd S=16384 n=128"
    assert errors([report]).splitlines()[-1] == (
        f"- rank 1: OutOfMemoryError: CUDA out of memory: {case} on 2 ranks; {case} on 4 ranks"
    )
    assert table([report]).splitlines()[2].endswith("| - | - | - | 50 %, - |")


@pytest.fixture
def files(tmp_path):
    paths = []
    for cp_size, rows in ((2, [OURS, MEGATRON]), (4, [OURS, FAILED])):
        paths.append(tmp_path / f"{cp_size}.json")
        Report(
            ENVIRONMENT | {"processes": cp_size},
            [dataclasses.replace(row, cp_size=cp_size) for row in rows],
        ).write(paths[-1])
    return [str(path) for path in paths]


def test_render_several_files(files, tmp_path, capsys):
    assert bench_context_parallel.main([str(tmp_path / "new"), "--render", *files]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [report["environment"]["processes"] for report in last] == [2, 4]
    assert last[0]["rows"][0]["step_ms"] == 60
    assert "CUDA out of memory" in last[1]["rows"][1]["error"]
    text = (tmp_path / "new" / "context_parallel.md").read_text()
    assert "2 ranks, measured" in text and "4 ranks, measured" in text and "Not measured" in text
    assert (tmp_path / "new" / "context_parallel.png").stat().st_size > 10_000


def test_json_keeps_everything(tmp_path):
    report = Report(ENVIRONMENT, [OURS, FAILED])
    report.write(tmp_path / "new" / "a.json")
    read = Report.read(tmp_path / "new" / "a.json")
    assert [json.dumps(row.as_json()) for row in read.rows] == [
        json.dumps(row.as_json()) for row in report.rows
    ]
    assert read.environment == ENVIRONMENT


def test_files_from_before_it_was_recorded_what_ran(tmp_path):
    path = tmp_path / "a.json"
    Report(ENVIRONMENT, [OURS]).write(path)
    content = json.loads(path.read_text())
    assert content["rows"][0].pop("ran") == "expanded, cudnn"
    path.write_text(json.dumps(content))
    read = Report.read(path)
    assert read.rows == [dataclasses.replace(OURS, ran="")]
    assert "| all_gather | expanded | - |" in table([read])


def test_render_without_matplotlib(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench_context_parallel.main([str(tmp_path / "new"), "--render", *files]) == 0
    assert "No plot: matplotlib is missing" in capsys.readouterr().out
    assert not (tmp_path / "new" / "context_parallel.png").exists()


@pytest.mark.parametrize("content", ("{", "[]", '{"environment": {}, "rows": [{}]}'))
def test_render_another_file(content, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert bench_context_parallel.main([str(tmp_path / "new"), "--render", str(path)]) == 2
    assert f"--render must be JSON that this script wrote; {path}" in capsys.readouterr().err
