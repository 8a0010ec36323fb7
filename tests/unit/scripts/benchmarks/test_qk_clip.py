"""scripts/benchmarks/qk_clip.py: a run on a CPU, and what it makes of wrong maxima."""

from __future__ import annotations

import json
import math
import shlex

from benchmarks import qk_clip
from benchmarks.qk_clip import QKClipBenchmark, QKClipReport
from benchmarks.qk_clip_attention import AttentionCase, AttentionRow
from tests.support.programs import run_script

TINY = shlex.split(
    "--device cpu --heads 2 --tokens 12 --maxima-tokens 30 --hidden-size 32 --q-lora-rank 16"
    " --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    " --seconds-per-row 0.001 --layers 2 --backends reference,layer,hopper"
)


def test_a_run_on_a_cpu(tmp_path):
    file = tmp_path / "results.json"
    done = run_script(qk_clip.__file__, *TINY, "--json", file, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    report = QKClipReport.read(file)
    of_suite = {
        suite: [row for row in report.rows if row.case.suite == suite] for suite in qk_clip.SUITES
    }
    maxima = [row for row in of_suite["maxima"] if row.case.backend == "reference"]
    assert [row.case.layout for row in maxima] == ["sbhd", "thd"]
    assert all(row.worst < 1e-6 and not row.error for row in maxima)
    refused = [row for row in report.rows if getattr(row.case, "backend", "") == "hopper"]
    assert refused and all(row.error == "it needs a GPU" for row in refused)
    layers = [row for row in of_suite["cost"] if row.case.backend == "layer"]
    assert [row.case.wanted for row in layers] == ["clip", "log"]
    assert all(row.recorded_step.median > 0 and row.ran for row in layers)
    assert len(of_suite["clip"]) == 4 and all(row.first > 0 for row in of_suite["clip"])
    last = json.loads(done.stdout.splitlines()[-1])[0]["rows"]
    assert any("step_ratio" in row for row in last)
    tables = "\n".join(QKClipReport.notes([report]))
    assert "| case | worst |" in tables and "step_ratio" in tables and "first_ms" in tables


def test_wrong_maxima(capsys):
    """The exit code says so: too small ones, bounds that are none, and what is no number."""
    case, right = AttentionCase("maxima", "cudnn", 2, 30), {"worst": 1e-6, "above_bound": -0.1}
    benchmark = QKClipBenchmark.__new__(QKClipBenchmark)
    wrong = ({"worst": 1e-3}, {"worst": math.nan}, {"above_bound": 1e-3})
    for changes, expected in (({}, 0), *((one, 1) for one in wrong)):
        report = QKClipReport({}, [AttentionRow(case, **{**right, **changes})])
        assert benchmark.exit_code(report) == expected
        assert ("wrong: maxima cudnn n=2" in capsys.readouterr().err) == bool(expected)
