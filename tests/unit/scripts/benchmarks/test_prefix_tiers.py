"""scripts/benchmarks/prefix_tiers.py on the CPU: every row finds its blocks where it says."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks import prefix_tiers
from tests.support.programs import run_script

TINY = shlex.split(
    "--device cpu --contexts 512 --suffix 40 --tokens 3 --step-tokens 64 --num-layers 2 "
    "--hidden-size 32 --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --heads 2 --ffn-hidden-size 32 --vocab-size 64"
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("tiers")
    command = [prefix_tiers.__file__, *TINY, "--json", folder / "out.json"]
    done = run_script(*command, "--prefix-folder", folder / "prefixes")
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((folder / "prefixes").iterdir()) == []
    content = json.loads((folder / "out.json").read_text())
    return {row["case"]["place"]: row for row in content["rows"]}


def test_rows(rows):
    assert tuple(rows) == prefix_tiers.PLACES
    assert [row["disk_blocks"] for row in rows.values()] == [0, 0, 8, 8, 8, 0]
    assert all(row["first_ms"] > 0 and row["decode_ms"] > 0 for row in rows.values())
    # The cache has 17 blocks, of which 4 are on the device: what one step needs at least is 3.
    assert rows["host"]["streamed_blocks"] >= 5 and rows["device"]["streamed_blocks"] is None
    assert rows["device"]["of_computed"] < 1
    assert rows["host"]["copy_ms"] > 0 and rows["device"]["copy_ms"] is None
