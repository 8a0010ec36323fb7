"""scripts/benchmarks/cached_attention.py: what it counts, and a run on a CPU."""

from __future__ import annotations

import json
import shlex

from benchmarks.cached_attention import CachedBenchmark, Case, flops, offloaded_bytes
from benchmarks.kit.arguments import DIMS

TINY = shlex.split(
    "--device cpu --heads 2 --contexts 24 --queries 6 --batches 2 --hidden-size 32 --q-lora-rank 16"
    " --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8"
    " --seconds-per-row 0.001 --context-chunk-size 8"
)


def test_counts():
    """Pairs, products and bytes, counted one by one."""
    case = Case("prefill", heads=3, batch=1, queries=4, context=5)
    pairs = sum(1 for query in range(5, 9) for key in range(9) if key <= query)
    assert case.pairs == pairs
    assert flops(case, DIMS) == {
        "attention": 3 * pairs * 2 * (192 + 128),
        "expansion": 9 * 3 * 2 * 512 * (128 + 128),
    }
    case = Case("offload", heads=16, batch=3, queries=1, context=99, resident=25)
    assert offloaded_bytes(case, DIMS, 2) == 3 * 75 * 576 * 2


def test_a_run_on_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert CachedBenchmark.main([str(tmp_path), *TINY]) == 0
    rows = json.loads((tmp_path / "cached.json").read_text())["rows"]
    assert [row["case"]["suite"] for row in rows] == ["prefill", "offload"]
    assert [row["error"] for row in rows] == ["", ""]
    assert rows[1]["case"]["resident"] == 6
    assert all(row["ours"]["median"] > 0 for row in rows)
    assert (tmp_path / "cached.png").stat().st_size > 1000
    [last] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"more_ms", "link_ms"} < set(last["rows"][1])
