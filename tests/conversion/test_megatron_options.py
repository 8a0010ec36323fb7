"""``inspect`` prints the model as words that Megatron's own parser reads back as the same model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint_conversion import cli
from checkpoint_conversion.megatron_args import to_megatron_args
from checkpoint_conversion.megatron_options import megatron_options, option_notes, without_option
from checkpoint_conversion.model import ModelConfig
from tests.conversion.released import RELEASED
from tests.conversion.support import CONFIGS, tiny_config, write_model
from tests.support.forked_python import forks_python

ROOT = Path(__file__).resolve().parents[2]
MODELS = {
    **{name: ModelConfig.from_hugging_face(fields) for name, fields in RELEASED.items()},
    **{f"tiny {name}": tiny_config(**fields) for name, fields in CONFIGS.items()},
    "tiny odd base": tiny_config(rope_theta=10000.5),
}
# Where Megatron's config and its command line differ in name, or in what says nothing.
_ELSEWHERE = """
num_moe_experts num_query_groups params_dtype rotary_interleaved tensor_model_parallel_size
pipeline_model_parallel_size expert_model_parallel_size virtual_pipeline_model_parallel_size
"""


@pytest.fixture(scope="module")
def megatron() -> dict:
    """What Megatron's parser makes of every model's words."""
    lines = [megatron_options(config) for config in MODELS.values()]
    with forks_python():
        done = subprocess.run(
            [sys.executable, "-m", "tests.conversion.megatron_parser"],
            input=json.dumps(lines),
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return {"fields": answer["fields"], **dict(zip(MODELS, answer["parsed"], strict=True))}


@pytest.mark.parametrize("name", MODELS)
def test_megatron_reads_the_same_model(megatron, name):
    """Every field of its config that the arguments of our checkpoints say, as they say it."""
    config = MODELS[name]
    wanted, found = vars(to_megatron_args(config)), megatron[name]
    unsaid = without_option(config)
    # These have their defaults without YaRN, where they mean nothing.
    silent = {"original_max_position_embeddings", "beta_fast", "beta_slow"}
    compared = 0
    for field in [*megatron["fields"], "vocab_size", "untie_embeddings_and_output_weights"]:
        value = wanted.get(field)
        if value is None or field in ({*_ELSEWHERE.split()} | silent | unsaid.keys()):
            continue
        if field == "moe_layer_freq" and not config.num_experts:
            continue
        assert found[field] == value, field
        compared += 1
    assert compared > 25
    assert found.get("num_experts") == wanted["num_experts"]
    assert found["normalization"] == "RMSNorm"
    assert found["max_position_embeddings"] == wanted["max_position_embeddings"]


def test_what_the_command_line_cannot_say():
    assert without_option(MODELS["deepseek-v3"]) == {}
    assert option_notes(MODELS["deepseek-v3"]) == []
    assert without_option(MODELS["kimi-k2"]) == {"beta_fast": 1.0}
    assert "beta_fast=1" in option_notes(MODELS["kimi-k2"])[0]
    assert without_option(MODELS["tiny odd base"]) == {
        "original_max_position_embeddings": 32,
        "rotary_base": 10000.5,
    }
    assert without_option(MODELS["moonlight"]) == {}


def test_inspect_prints_one_line_for_a_shell(tmp_path, capsys):
    config = tiny_config(num_hidden_layers=4)
    source = write_model(tmp_path / "hf", num_hidden_layers=4)
    assert cli.main(["inspect", str(source)]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    line = lines[lines.index("The model on Megatron's command line:") + 1]
    assert shlex.split(line) == megatron_options(config)
    assert "'([0]*1+[1]*3)'" in line
    for option in ("--multi-latent-attention", "--moe-router-num-groups 2", "--norm-epsilon 1e-06"):
        assert option in line
    assert cli.main(["inspect", str(source), "--json"]) == cli.DONE
    document = json.loads(capsys.readouterr().out)
    assert document["megatron_command_line"] == line
    assert document["megatron_options"] == megatron_options(config)
    assert document["without_option"] == {"original_max_position_embeddings": 32}
    assert any("original_max_position_embeddings=32" in note for note in document["notes"])
