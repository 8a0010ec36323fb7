"""scripts/benchmarks/pretrain_gpt.py: ``--spec`` in Megatron's own loop, for GPT and hybrid models.

It runs Megatron's arguments, builders and loop as Megatron's own scripts do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import megatron_log
from benchmarks.kit.command import ALONE
from benchmarks.pretraining import ENTRY, PretrainingBenchmark, megatron_arguments
from tests.support import needs
from tests.support.forked_python import forks_python

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


# Importing all of it takes longer than training: once, then a process for each.
FORKED = """
import json, os, sys
import pretrain_gpt
for log, *words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        output = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv[1:] = words
        pretrain_gpt.main()
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(log)
"""


def arguments(more: str) -> list[str]:
    """Megatron's usual ones, but for what ``more`` says."""
    args = PretrainingBenchmark.parse(["out", *SIZES.split()])
    usual = megatron_arguments(args, "absorbed", on_gpu=False)
    for name, values in (("--spec", 2), ("--num-layers", 1)):
        start = usual.index(name)
        del usual[start : start + 1 + values]
    return [*usual, *more.split()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """Of both models, from the same weights, and of ``--help``."""
    folder: Path = tmp_path_factory.mktemp("pretrain")
    commands = {
        folder / f"{name}.log": arguments(more.format(weights=folder / "weights.pt"))
        for name, more in {"gpt": GPT, "hybrid": HYBRID}.items()
    }
    commands[folder / "help.log"] = ["--help"]
    runs = json.dumps([[str(log), *words] for log, words in commands.items()])
    path = os.pathsep.join([str(ENTRY.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **ALONE, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, runs]
    with forks_python():
        code = subprocess.run(command, env=env, capture_output=True, timeout=300).returncode
    texts = {log.stem: log.read_text() for log in commands if log.exists()}
    assert code == 0, list(texts.values())[-1][-3000:]
    return texts


@pytest.fixture
def logs(outputs) -> dict[str, str]:
    return {name: outputs[name] for name in ("gpt", "hybrid")}


def test_help(outputs):
    """Of Megatron's arguments, one of which has a percent sign, and of ours."""
    assert outputs["help"].startswith("usage: ") and "Traceback" not in outputs["help"]
    assert "1.10 = 10%" in outputs["help"] and "--first-weights FILE" in outputs["help"]


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
