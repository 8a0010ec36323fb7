"""scripts/benchmarks/decode_context_parallel.py: three layouts of a model on two processes."""

from __future__ import annotations

import json

from benchmarks import decode_context_parallel
from benchmarks.decode_context_parallel import LAYOUTS, Case, Row, SharedReport
from tests.support.programs import run_script

SIZES = (
    "--hidden-size 32 --q-lora-rank 16 --kv-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --heads 4 --ffn-hidden-size 32 --num-layers 1 --vocab-size 64 --context 70 "
    "--batch 2 --steps 1"
)


def test_two_processes(tmp_path):
    command = [decode_context_parallel.__file__, "--device", "cpu", *SIZES.split()]
    command += ["--json", tmp_path / "rows.json"]
    done = run_script(*command, ranks=2, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "| best |" in done.stdout
    json.loads(done.stdout.splitlines()[-1])
    rows = SharedReport.read(tmp_path / "rows.json").rows
    assert [row.case for row in rows] == [Case(layout, 70, 2) for layout in LAYOUTS]
    assert not any(row.error for row in rows) and all(row.seconds > 0 for row in rows)
    plain, shared, own = rows
    # Of a token 24 + 8 numbers in float32.
    assert plain.cache_bytes == plain.cache_tokens * 32 * 4
    assert plain.cache_bytes == 2 * shared.cache_bytes
    assert plain.cache_bytes > own.cache_bytes
    assert plain.weight_bytes == shared.weight_bytes < own.weight_bytes


def test_table():
    """The fastest of those that ran, and the rate of as many requests as the memory of tp holds."""
    cases = [("tp", 4, 1.0), ("tp", 8, 1.0), ("shared", 8, 0.8), ("own", 8, 0.5)]
    rows = [Row(Case(layout, 1024, batch), "", s, 1, 1) for layout, batch, s in cases]
    rows.append(Row(Case("shared", 1024, 4), "RuntimeError: no"))
    _, _, four, eight = SharedReport({"ranks": 2}, rows).table()
    assert four == "| 1k | 4 | 4 |  |  | tp |  |"
    assert eight == "| 1k | 8 | 8 | 10 | 16 | own | 4 |"
