"""pretrain_gpt.py: ``--spec`` in Megatron's own loop, for GPT and hybrid models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kit.command import ALONE
from tests.support import needs
from tests.support.forked_python import forks_python

FOLDER = Path(__file__).resolve().parents[4] / "scripts/benchmarks"
pytestmark = needs.no_gpu
# Clipping fails on a CPU: it expects a tensor type with "cuda" in its name.
USUAL = """
--hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --q-lora-rank 16 --kv-lora-rank 16
--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --vocab-size 128 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 3e-4
--min-lr 3e-5 --lr-warmup-iters 1 --seed 1234 --multi-latent-attention --qk-layernorm --swiglu
--disable-bias-linear --no-rope-fusion --untie-embeddings-and-output-weights --rope-type rope
--position-embedding-type rope --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0
--lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer --eval-interval 4 --eval-iters 0
--no-create-attention-mask-in-dataloader --log-interval 1 --no-gradient-accumulation-fusion
--no-one-logger --transformer-impl local --distributed-backend gloo --num-workers 0 --clip-grad 0
--no-persist-layer-norm --no-masked-softmax-fusion --use-cpu-initialization
"""
OURS = "--spec specs.absorbed_mla_layer_specs absorbed_mla_layer_spec"
# In pairs, of which the second begins with the weights of the first.
RUNS = {
    "standard": "--num-layers 2 --save-first-weights {folder}/a.pt "
    "--spec absorbed_mla.standard_mla get_standard_mla_layer_spec",
    "absorbed": f"--num-layers 2 --first-weights {{folder}}/a.pt {OURS}",
    "gpt": f"--num-layers 2 --mtp-num-layers 1 --save-first-weights {{folder}}/b.pt {OURS} "
    "--builder specs.absorbed_mla_gpt_builder.AbsorbedMLAGPTModelBuilder",
    "hybrid": "--hybrid-layer-pattern +-+-/+- --first-weights {folder}/b.pt "
    "--spec specs.absorbed_mla_hybrid_specs absorbed_mla_hybrid_stack_spec",
}
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


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, str]:
    """Of all models, from the same weights, and of ``--help``."""
    folder: Path = tmp_path_factory.mktemp("pretrain")
    commands = {
        folder / f"{name}.log": [*USUAL.split(), *more.format(folder=folder).split()]
        for name, more in RUNS.items()
    }
    commands[folder / "help.log"] = ["--help"]
    runs = json.dumps([[str(log), *words] for log, words in commands.items()])
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **ALONE, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", FORKED, runs]
    with forks_python():
        code = subprocess.run(command, env=env, capture_output=True, timeout=300).returncode
    texts = {log.stem: log.read_text() for log in commands if log.exists()}
    assert code == 0, list(texts.values())[-1][-3000:]
    return texts


def logged(log: str, what: str) -> list[float]:
    """A figure of every iteration in Megatron's log."""
    return [float(one) for one in re.findall(rf"\| {what}: ([-+0-9.eE]+)", log)]


def test_help(outputs):
    """Of Megatron's arguments, one of which has a percent sign, and of ours."""
    assert outputs["help"].startswith("usage: ") and "Traceback" not in outputs["help"]
    assert "1.10 = 10%" in outputs["help"] and "--first-weights FILE" in outputs["help"]


@pytest.mark.parametrize(
    ("one", "other", "tolerance"), [("standard", "absorbed", 1e-5), ("gpt", "hybrid", 0)]
)
def test_both_train_alike(outputs, one, other, tolerance):
    """Ours in every digit that Megatron logs; standard MLA rounds otherwise, in float32."""
    logs = [outputs[one], outputs[other]]
    for what in ("lm loss", "grad norm", "mtp_1 loss"):
        left, right = (logged(log, what) for log in logs)
        assert left == pytest.approx(right, abs=tolerance, rel=0)
        assert len(left) == len(set(left)) == (0 if tolerance and what == "mtp_1 loss" else 3)
    counts = {re.findall(r"model parallel rank .*: (\d+)", log)[0] for log in logs}
    assert len(counts) == 1


@pytest.mark.parametrize(("name", "attentions"), [("standard", 0), ("absorbed", 2), ("hybrid", 3)])
def test_all_attentions_are_absorbed(outputs, name, attentions):
    """Two of the decoder, and one of MTP."""
    assert outputs[name].count("linear_k_up_proj.weight") >= attentions
    assert ("linear_kv_up_proj.weight" in outputs[name]) == (attentions == 0)
