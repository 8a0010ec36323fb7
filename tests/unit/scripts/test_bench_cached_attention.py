"""scripts/bench_cached_attention.py: what it counts, and what it reports."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts"))

import bench_cached_attention
from cached_benchmark.cases import Case, flops, offloaded_bytes
from context_parallel_benchmark.arguments import DIMS

TINY = shlex.split(
    "--device cpu --heads 2 --contexts 24 --queries 6 --batches 2 --hidden-size 32 --q-lora-rank 16"
    " --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    " --seconds-per-row 0.001 --context-chunk-size 8"
)


class TestCounts:
    def test_prefill(self):
        """Pairs and products, counted one by one."""
        case = Case("prefill", heads=3, batch=1, queries=4, context=5)
        pairs = sum(1 for query in range(5, 9) for key in range(9) if key <= query)
        assert case.pairs == pairs
        assert flops(case, DIMS) == {
            "attention": 3 * pairs * 2 * (192 + 128),
            "expansion": 9 * 3 * 2 * 512 * (128 + 128),
        }

    def test_offload(self):
        case = Case("offload", heads=16, batch=3, queries=1, context=99, resident=25)
        assert offloaded_bytes(case, DIMS, 2) == 3 * 75 * 576 * 2


class TestRun:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("cached out")
        assert bench_cached_attention.main([str(folder), *TINY]) == 0
        return folder

    def test_rows(self, folder):
        rows = json.loads((folder / "cached.json").read_text())["rows"]
        assert [row["case"]["suite"] for row in rows] == ["prefill", "offload"]
        assert [row["error"] for row in rows] == ["", ""]
        assert rows[1]["case"]["resident"] == 6
        assert all(row["ours"]["median"] > 0 for row in rows)

    def test_written(self, folder):
        text = (folder / "cached.md").read_text()
        assert "| 2 | 6 | 24 |" in text and "| 2 | 2 | 24 | 6 |" in text
        assert (folder / "cached.png").stat().st_size > 1000

    def test_last_line_is_json(self, folder, capsys):
        argv = [str(folder), "--render", str(folder / "cached.json")]
        assert bench_cached_attention.main(argv) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert set(summary["offload n=2 b=2 q=1 context=24 resident=6"]) == {"more_ms", "link_ms"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--suites", "decode"], "prefill, offload"),
        (["--budget-ratio", "1"], "--budget-ratio must be at least 2"),
        (["--render", "missing.json"], "missing.json"),
    ],
)
def test_mistakes(argv, message, capsys):
    assert bench_cached_attention.main(["/nowhere", *argv]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
