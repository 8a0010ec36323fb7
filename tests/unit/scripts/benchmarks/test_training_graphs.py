"""scripts/benchmarks/training_graphs.py: a run on a CPU, without graphs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.programs import run_script

SCRIPT = Path(__file__).resolve().parents[4] / "scripts/benchmarks/training_graphs.py"
TINY = (
    "--device cpu --heads 2 --seq-lens 8 --hidden-size 64 --ffn-hidden-size 32 --q-lora-rank 32 "
    "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
    "--rounds 2 --steps 2"
)


def test_a_run_on_a_cpu(tmp_path):
    """In a process of its own, which leaves its groups."""
    file = tmp_path / "graphs.json"
    command = [SCRIPT, *TINY.split(), "--json", file]
    done = run_script(*command, CUDA_VISIBLE_DEVICES="", GIT_COMMIT="abc")
    assert done.returncode == 0, done.stderr[-2000:]
    [found] = json.loads(done.stdout.splitlines()[-1])
    assert found["environment"]["layers"] == "local"
    rows = found["rows"]
    assert len(rows) == 8
    assert {row["error"] for row in rows if row["graphs"]} == {"it needs a GPU"}
    measured = [row for row in rows if "step_ms" in row]
    assert [row["recomputed"] for row in measured] == [True, False]
    assert {row["implementation"] for row in measured} == {"ours"}
    assert all(row["step_ms"] > 0 and row["host_ms"] > 0 for row in measured)
    [error] = {r["error"] for r in rows if r["implementation"] == "megatron" and not r["graphs"]}
    assert error == "Megatron's MLA needs TransformerEngine's attention"
