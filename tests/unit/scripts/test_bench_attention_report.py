"""The reports of scripts/bench_attention.py."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_attention
from attention_benchmark.cases import LayerCase
from attention_benchmark.report import (
    Report,
    brief,
    errors,
    markdown,
    summary,
    tables,
    targets,
)
from attention_benchmark.row import Refused, failed
from tests.support.attention_rows import CORE, ENVIRONMENT, MEGATRON, OURS, REFUSED, ROWS, times


def test_tables():
    report = Report(ENVIRONMENT, ROWS)
    (_, _, layers), (_, _, cores) = tables([report])
    assert layers[1][:6] == ["thd", "8k", "128", "ours", "mla_up_proj", "expanded, cudnn"]
    assert layers[1][6:10] == ["10.00 ms", "38.00 ms", "0.24 GiB", "1.95 GiB"]
    assert layers[1][10:] == ["1.000", "0.950", "0.250"]
    assert layers[0][-3:] == ["-", "-", "-"]
    # 16 heads x 8192^2 / 2 pairs x 640 or 1664, in 1 and 2 ms.
    assert cores == [
        ["expanded", "8k", "16", "torch, cudnn", "1.00 ms", "2.00 ms", "344", "447", "412"]
    ]
    text = markdown([report])
    assert "Measured on 2026-01-01 by `python bench_attention.py` at abc: a device" in text
    assert "700 TFLOP/s in a matrix product" in text


def test_layers_that_are_compared_stand_together():
    order = [("ours", True), ("megatron", False), ("ours", False), ("megatron", True)]
    rows = [
        dataclasses.replace(MEGATRON, case=LayerCase(*way, 16, tokens, "sbhd"))
        for way in order
        for tokens in (8192, 4096)
    ]
    (_, _, lines), _ = tables([Report(ENVIRONMENT, rows)])
    assert [line[1] for line in lines] == 4 * ["4k"] + 4 * ["8k"]
    expected = [[who, how] for how in ("-", "mla_up_proj") for who in ("megatron", "ours")]
    assert [line[3:5] for line in lines[:4]] == expected


def test_ratios_are_of_the_same_input_with_the_same_recomputation():
    """Otherwise memory saved by recomputation looks like the layer's own doing."""
    report = Report(ENVIRONMENT, ROWS)
    assert report.ratios(OURS) == {"forward": 1.0, "step": pytest.approx(0.95), "kept": 0.25}
    for change in ({"heads": 16}, {"tokens": 4096}, {"layout": "sbhd"}, {"recompute": False}):
        other = dataclasses.replace(OURS, case=dataclasses.replace(OURS.case, **change))
        assert report.ratios(other) == {}
    plain = [
        dataclasses.replace(row, case=dataclasses.replace(row.case, recompute=False), **figures)
        for row, figures in ((MEGATRON, {"step": times(0.019)}), (OURS, {}))
    ]
    assert report.ratios(plain[1]) == {}
    both = Report(ENVIRONMENT, [*plain, *ROWS])
    assert both.peer(OURS) is MEGATRON and both.ratios(plain[1])["step"] == pytest.approx(2)


@pytest.mark.parametrize(
    "step, kept, met", ((0.04, 1010, True), (0.041, 1, False), (0.01, 1011, False))
)
def test_targets(step, kept, met):
    row = dataclasses.replace(OURS, step=times(step), kept_bytes=kept * 2**20)
    line = targets([Report(ENVIRONMENT, [MEGATRON, row])]).splitlines()[-1]
    assert line.startswith(f"- {'met' if met else 'missed'}: ours recompute n=128 S=8192 thd: step")
    assert not targets([Report(ENVIRONMENT, [MEGATRON])])


def test_errors_are_grouped_by_why():
    others = [
        dataclasses.replace(REFUSED, case=dataclasses.replace(REFUSED.case, tokens=n))
        for n in range(1, 7)
    ]
    assert errors([Report(ENVIRONMENT, others)]).splitlines()[-1] == (
        "- too wide for flash: torch, flash absorbed n=16 S=1; torch, flash absorbed n=16 S=2; "
        "torch, flash absorbed n=16 S=3; torch, flash absorbed n=16 S=4; 2 more"
    )
    assert failed(CORE.case, Refused("as it says")).error == "as it says"


def test_lines_while_measuring():
    report = Report(ENVIRONMENT, ROWS)
    assert brief(OURS, report) == (
        "ours recompute n=128 S=8192 thd (expanded, cudnn): forward 10.00 ms, step 38.00 ms, "
        "forward 1.000 of megatron's, step 0.950 of megatron's, kept 0.250 of megatron's"
    )
    assert brief(REFUSED, report) == "torch, flash absorbed n=16 S=8192: too wide for flash"


def test_json_keeps_everything(tmp_path):
    Report(ENVIRONMENT, ROWS).write(tmp_path / "new" / "a.json")
    read = Report.read(tmp_path / "new" / "a.json")
    assert read.rows == ROWS and read.environment == ENVIRONMENT
    assert summary([read]) == summary([Report(ENVIRONMENT, ROWS)])


def test_render_several_files_without_optional_packages(tmp_path, capsys, monkeypatch):
    for module in ("matplotlib", "rich.console"):
        monkeypatch.setitem(sys.modules, module, None)
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        Report(ENVIRONMENT, ROWS).write(path)
    assert bench_attention.main([str(tmp_path / "new"), "--render", *map(str, paths)]) == 0
    output = capsys.readouterr().out
    assert "No plot: matplotlib is missing" in output
    assert output.count("torch, cudnn  1.00 ms") == 2
    assert not (tmp_path / "new" / "attention.png").exists()


@pytest.mark.parametrize("content", ("{", "[]", '{"environment": {}, "rows": [{}]}'))
def test_render_another_file(content, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert bench_attention.main([str(tmp_path / "new"), "--render", str(path)]) == 2
    assert f"--render must be JSON that this script wrote; {path}" in capsys.readouterr().err
