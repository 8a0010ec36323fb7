"""scripts/benchmarks/fp8_training.py: trainings run, and their losses are compared."""

from __future__ import annotations

import json

import pytest

from benchmarks.fp8_training import Row, TrainingBenchmark, TrainingCase, TrainingReport
from tests.support import needs

TINY = """
--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --q-lora-rank 16
--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --vocab-size 512
--seq-length 16 --eval-iters 1
"""


@needs.no_gpu
@pytest.mark.usefixtures("forked_python")
def test_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "abc")
    argv = [str(tmp_path), "--iterations", "2", "--first-iterations", "1"]
    argv += ["--precisions", "bf16,tensorwise"]
    # A training without a GPU cannot be in FP8, and says so.
    assert TrainingBenchmark.main([*argv, "--train", " ".join(TINY.split())]) == 1
    found = json.loads((tmp_path / "fp8_training.json").read_text())
    plain, fp8 = found["rows"]
    assert len(plain["losses"]) == 2 and 5 < plain["losses"][0] < 7 and plain["validation"] > 0
    assert "needs a GPU" in fp8["error"] and not fp8["losses"]
    assert "needs a GPU" in capsys.readouterr().out
    argv = [str(tmp_path / "again"), "--render", str(tmp_path / "fp8_training.json")]
    assert TrainingBenchmark.main(argv) == 0


@pytest.mark.parametrize(("loss", "close"), [(2.019, True), (2.021, False), (1.979, False)])
def test_tolerance(loss, close):
    """1 % of the mean, in either direction."""

    def row(precision: str, last: float) -> Row:
        case, more = TrainingCase("absorbed", precision), {"seconds": [1.0] * 4, "tokens": 100}
        return Row(case=case, losses=[last] * 4, validation=2.0, **more)

    plain, fp8 = row("bf16", 2.0), row("delayed", loss)
    report = TrainingReport({}, [plain, fp8])
    assert report.is_close(fp8) == close and report.is_close(plain)
    assert report.figures(fp8)["loss of bf16's"] == pytest.approx(loss / 2)
    assert report.figures(fp8)["tokens_per_second"] == 100
