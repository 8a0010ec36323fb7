"""Megatron-Core 0.18 loads what the converter writes, and computes what transformers does.

``bash scripts/run_tests.sh old-megatron`` installs it beside the one of the environment and names
its folder in ``ABSORBED_MLA_OLD_MEGATRON``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_conversion.convert import convert
from checkpoint_conversion.formats.base import TargetOptions
from tests.conversion.models import Architecture, logits_of, make_model, save, token_batch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("ABSORBED_MLA_OLD_MEGATRON")
# Of the largest logit; float32 sums in another order stay 10 times below.
TOLERANCE = 1e-4
# Numbered layers in one, stacked ones in the other.
CASES = {
    "megatron": Architecture("v3", q_lora=True, moe=True, rope="yarn"),
    "absorbed": Architecture("v2", q_lora=False, moe=False, rope="rope"),
}

pytestmark = pytest.mark.skipif(
    FOLDER is None,
    reason="ABSORBED_MLA_OLD_MEGATRON names no folder; scripts/run_tests.sh old-megatron makes one",
)


@pytest.mark.parametrize("to", CASES)
def test_loads_and_predicts(tmp_path, to):
    model, tokens = make_model(CASES[to]), token_batch()
    expected = logits_of(model, tokens)
    source = save(model, tmp_path / "hf")
    # Of local layers, which a CPU can run.
    convert(source, tmp_path / to, to, TargetOptions(norms="separate"))
    torch.save(tokens, tmp_path / "tokens.pt")
    report = predicted(tmp_path / to, tmp_path / "tokens.pt", tmp_path / "logits.pt")
    assert report["version"].partition("+")[0] == "0.18.0"
    assert report["kv_lora_rank"] == model.config.kv_lora_rank
    # 0.19's place of what 0.18 reads from common.pt.
    assert report["not asked for"] == ["common_state"]
    assert report["not found"] == []
    logits = torch.load(tmp_path / "logits.pt")
    assert (logits - expected).abs().max() < TOLERANCE * expected.abs().max()


def predicted(folder: Path, tokens: Path, logits: Path) -> dict:
    """What the other Megatron's process says; it writes ``logits``."""
    paths = [FOLDER, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.old_megatron.predict", folder, tokens, logits],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
