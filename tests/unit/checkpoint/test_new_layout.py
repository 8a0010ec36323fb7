"""A checkpoint layout is one file: everything that writes and reads layouts takes it from there."""

import json

import pytest
import torch

from absorbed_mla import to_absorbed_state_dict, to_standard_state_dict
from absorbed_mla.checkpoint.layout import Layout, Rename, Stack
from absorbed_mla.registry import CHECKPOINT_LAYOUTS
from checkpoint_conversion import cli
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support.refusal import refusal
from tests.unit.checkpoint.test_state_dict import DIMS, assert_same, attention_with_weights

ATTENTION = "self_attention."
# The output projection has another name, and the K/V down-projection is two weights.
LAYOUT = Layout(
    name="other_output",
    summary="output projection called o_proj, K/V down-projection in two tensors",
    option="output_style",
    value="renamed",
    default="usual",
    help="the output projection's name",
    renames=(Rename(f"{ATTENTION}linear_proj.weight", f"{ATTENTION}o_proj.weight"),),
    split=(
        Stack(
            f"{ATTENTION}linear_kv_down_proj.weight",
            (f"{ATTENTION}linear_latent.weight", f"{ATTENTION}linear_k_rope.weight"),
            rows=lambda sizes: (sizes.kv_lora_rank, sizes.qk_rope_head_dim),
            columns=lambda sizes: sizes.hidden_size,
        ),
    ),
)
OWN = {"o_proj.weight", "linear_latent.weight", "linear_k_rope.weight"}


@pytest.fixture
def registered():
    with CHECKPOINT_LAYOUTS.registered(LAYOUT):
        yield


def test_files_declare_their_names():
    assert [one.name for one in CHECKPOINT_LAYOUTS] == list(CHECKPOINT_LAYOUTS.names())
    assert {one.option for one in CHECKPOINT_LAYOUTS} == {"norms", "kv_up", "down"}


def test_state_dict(registered):
    source, target = attention_with_weights(0), attention_with_weights(1)
    state = source.state_dict()
    written = to_standard_state_dict(state, DIMS, output_style="renamed", norms="fused")
    assert written.keys() >= OWN and "linear_proj.weight" not in written
    latent = written["linear_latent.weight"]
    assert torch.equal(latent, state["linear_kv_down_proj.weight"][: DIMS.kv_lora_rank])
    assert_same(to_absorbed_state_dict(written, DIMS, ""), state)
    target.load_state_dict(written)
    assert_same(target.state_dict(), state)


def test_misfits_are_explained_in_its_words(registered):
    attention = attention_with_weights()
    state = attention.state_dict()
    written = to_standard_state_dict(state, DIMS, prefix="", output_style="renamed")
    wrong = {**written, "linear_latent.weight": torch.zeros(3, 3)}
    with refusal("linear_latent.weight has shape (3, 3)", "output_style renamed"):
        attention.load_state_dict(wrong)
    with refusal("o_proj.weight", "stored twice"):
        attention.load_state_dict({**written, "linear_proj.weight": state["linear_proj.weight"]})
    with refusal("output_style", "usual, renamed", "got 'other'"):
        to_standard_state_dict(state, DIMS, output_style="other")


def test_converter(registered, tmp_path, capsys):
    """Its option, its recognition and its inverse."""
    config = tiny_config()
    source = write_hugging_face(tmp_path / "hf", config, random_tensors(config))
    there, back = tmp_path / "there", tmp_path / "back"

    def run(*words: object) -> dict:
        capsys.readouterr()
        assert cli.main([*map(str, words), "--json"]) == cli.DONE
        return json.loads(capsys.readouterr().out)

    options = ("--output-style", "renamed", "--layers", "numbered")
    run("convert", source, there, "--to", "megatron", *options)
    manifest = json.loads((there / "release/conversion_manifest.json").read_text())
    assert manifest["target"]["options"]["output_style"] == "renamed"
    found = run("inspect", there)
    assert found["layout"]["output_style"] == "renamed"
    run("convert", there, back, "--to", "hf")
    assert run("verify", source, back, "--no-logits")["equal"]


def test_nothing_of_it_stays():
    with pytest.raises(ValueError, match="output_style"):
        to_standard_state_dict({}, DIMS, output_style="renamed")
    with pytest.raises(SystemExit):
        cli.main(["convert", "a", "b", "--to", "megatron", "--output-style", "renamed"])
