"""scripts/benchmarks/pretrain_gpt.py: ``--spec`` in Megatron's own loop, for GPT and hybrid models.

It runs Megatron's arguments, builders and loop as Megatron's own scripts do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import megatron_log
from benchmarks.kit.command import ALONE
from benchmarks.pretraining import ENTRY, PretrainingBenchmark, megatron_arguments
from tests.support import needs

pytestmark = needs.no_gpu

SIZES = """
--iterations 3 --skip 1 --layers 2 --hidden-size 32 --heads 2 --ffn-hidden-size 64 --q-lora-rank 16
--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --vocab-size 128
--seq-length 32 --global-batch-size 2
"""
GPT = """
--spec specs.absorbed_mla_layer_specs absorbed_mla_layer_spec --num-layers 2 --mtp-num-layers 1
--builder specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder --save-first-weights {weights}
"""
HYBRID = """
--spec specs.absorbed_mla_hybrid_specs absorbed_mla_hybrid_stack_spec
--hybrid-layer-pattern +-+-/+- --first-weights {weights}
"""


def pretrain(more: str) -> str:
    """The log of a training with these arguments of Megatron's beside the usual ones."""
    args = PretrainingBenchmark.parse(["out", *SIZES.split()])
    usual = megatron_arguments(args, "absorbed", on_gpu=False)
    for name, values in (("--spec", 2), ("--num-layers", 1)):
        start = usual.index(name)
        del usual[start : start + 1 + values]
    env = {**os.environ, **ALONE, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(ENTRY), *usual, *more.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict[str, str]:
    """Of both models, from the same weights."""
    weights: Path = tmp_path_factory.mktemp("pretrain") / "weights.pt"
    commands = {"gpt": GPT, "hybrid": HYBRID}
    return {name: pretrain(one.format(weights=weights)) for name, one in commands.items()}


def test_both_models_train_alike(logs):
    """In every digit that Megatron logs; the losses of MTP are in the lines, too."""
    gpt, hybrid = (list(megatron_log.iterations(log)) for log in logs.values())
    assert len(gpt) == 3 and len({one.loss for one in gpt}) == 3
    assert [one.loss for one in hybrid] == [one.loss for one in gpt]
    assert [one.grad_norm for one in hybrid] == [one.grad_norm for one in gpt]
    assert all(log.count("mtp_1 loss:") == 3 for log in logs.values())


def test_all_attentions_are_absorbed(logs):
    """Two of the decoder and one of MTP."""
    for log in logs.values():
        assert log.count("linear_k_up_proj.weight") >= 3
        assert "linear_kv_up_proj.weight" not in log
    assert megatron_log.parameters(logs["gpt"]) == megatron_log.parameters(logs["hybrid"])
