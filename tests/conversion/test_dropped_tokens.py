"""Rows of the embedding that a smaller vocabulary loses: padding, or tokens that were added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint_conversion import cli
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.verify import verify
from tests.conversion.legacy_support import only_args_config, write_legacy
from tests.conversion.support import (
    change_json,
    hugging_face_config,
    load_all,
    random_tensors,
    tiny_config,
    write_hugging_face,
    write_torch_dist,
)

# Seven tokens were added.
BEFORE, AFTER = 64, 71
CONFIG = tiny_config(vocab_size=AFTER)
TENSORS = random_tensors(CONFIG)
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def stale(tmp_path) -> Path:
    """The config.json of the model without the added tokens."""
    path = tmp_path / "stale.json"
    path.write_text(json.dumps(hugging_face_config(vocab_size=BEFORE)))
    return path


def write_megatron(folder: Path) -> Path:
    write_torch_dist(folder, CONFIG, TENSORS)
    return folder


def write_megatron_without_config(folder: Path) -> Path:
    write_torch_dist(folder, CONFIG, TENSORS)
    (folder / "release/hugging_face/config.json").unlink()
    return folder


def write_ranks(folder: Path) -> Path:
    write_legacy(folder, CONFIG, TENSORS, vocab_multiple=1)
    return folder


def write_ranks_without_config(folder: Path) -> Path:
    write_legacy(folder, CONFIG, TENSORS, vocab_multiple=1)
    only_args_config(folder)
    return folder


WRITERS = {
    write_megatron: f"the checkpoint's own config.json has a vocab_size of {AFTER}",
    write_megatron_without_config: f"the checkpoint's arguments have a vocab_size of {AFTER}",
    write_ranks: f"the checkpoint's own config.json has a vocab_size of {AFTER}",
    write_ranks_without_config: f"the checkpoint's arguments have a vocab_size of {AFTER}",
}


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_tokens_are_not_dropped(tmp_path, stale, write):
    source, target = write(tmp_path / "source"), tmp_path / "target"
    why = f"7 rows of the embedding, after {BEFORE} by its config.json, would be lost, though "
    with pytest.raises(CheckpointError, match=f"{why}{WRITERS[write]}.*--drop-tokens"):
        convert(source, target, "hf", hf_config=stale)
    assert not target.exists()
    report = convert(source, target, "hf", hf_config=stale, drop_tokens=True)
    assert any("are dropped (--drop-tokens), though" in note for note in report.plan.notes)
    found = load_all(open_checkpoint(target).hugging_face_tensors())
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor[:BEFORE] if name in VOCABULARY else tensor)


def test_verify_and_inspect(tmp_path, stale, capsys):
    source = write_megatron(tmp_path / "source")
    small = {n: t[:BEFORE] if n in VOCABULARY else t for n, t in TENSORS.items()}
    before = write_hugging_face(tmp_path / "before", tiny_config(vocab_size=BEFORE), small)
    with pytest.raises(CheckpointError, match="7 rows of the embedding"):
        verify(source, before, hf_config=stale, logits=False)
    assert verify(source, before, hf_config=stale, drop_tokens=True, logits=False).accepted
    words = [str(source), "--hf-config", str(stale)]
    assert cli.main(["inspect", *words]) == cli.REFUSED
    assert cli.main(["inspect", *words, "--drop-tokens"]) == cli.DONE
    assert cli.main(["verify", *words[:1], str(before), *words[1:], "--no-logits"]) == cli.REFUSED
    assert "7 rows of the embedding" in capsys.readouterr().err


def test_own_config_and_arguments_contradict(tmp_path):
    """Without any ``hf_config``."""
    source = write_megatron(tmp_path / "source")
    change_json(source / "release/hugging_face/config.json", vocab_size=BEFORE)
    with pytest.raises(CheckpointError, match=f"arguments have a vocab_size of {AFTER}"):
        open_checkpoint(source)
    assert open_checkpoint(source, drop_tokens=True).config.vocab_size == BEFORE


@pytest.mark.parametrize(("multiple", "tp", "fits"), [(4, 2, True), (7, 1, False), (1, 4, False)])
def test_more_rows_than_padding_can_be(tmp_path, stale, monkeypatch, multiple, tp, fits):
    """Where Megatron's arguments hold no vocabulary but the padded one."""
    source = write_megatron_without_config(tmp_path / "source")
    args = {
        "make_vocab_size_divisible_by": multiple,
        "tensor_model_parallel_size": tp,
        "vocab_size": None,
        "padded_vocab_size": AFTER,
    }
    monkeypatch.setattr("checkpoint_conversion.formats.torch_dist.arguments", lambda _: args)
    if fits:
        notes = open_checkpoint(source, hf_config=stale).notes
        assert notes == ["7 rows of padding after the vocabulary are dropped"]
        return
    why = f"padding to a multiple of {multiple * tp} .*{multiple} by .*{tp}. has fewer"
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(source, hf_config=stale)


def test_more_entries_than_tokens(tmp_path):
    """A config.json with padding in its vocabulary loses nothing."""
    source = tmp_path / "source"
    write_torch_dist(source, CONFIG, TENSORS, vocab_multiple=128)
    larger = tmp_path / "larger.json"
    larger.write_text(json.dumps(hugging_face_config(vocab_size=128)))
    found = load_all(open_checkpoint(source, hf_config=larger).hugging_face_tensors())
    assert found["lm_head.weight"].shape[0] == 128


def test_option_without_a_megatron_checkpoint(tmp_path):
    folder = write_hugging_face(tmp_path / "model", CONFIG, TENSORS)
    for refuse in (
        lambda: open_checkpoint(folder, drop_tokens=True),
        lambda: verify(folder, folder, drop_tokens=True),
    ):
        with pytest.raises(CheckpointError, match="--drop-tokens is for Megatron checkpoints"):
            refuse()


def test_adapter_beside_the_weights(tmp_path):
    """transformers would add it to them."""
    folder = write_hugging_face(tmp_path / "model", CONFIG, TENSORS)
    (folder / "adapter_config.json").write_text("{}")
    assert open_checkpoint(folder).config == CONFIG
    (folder / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"PEFT adapter \(adapter_model\.bin\) beside"):
        open_checkpoint(folder)
