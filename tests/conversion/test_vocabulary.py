"""Rows of the vocabulary that a smaller one loses, padding or tokens, and tied output layers.

Tied models may store the output layer all the same, as DeepSpeed and older trainers do.
"""

import json
from pathlib import Path

import pytest
import torch

from checkpoint_conversion import cli
from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from checkpoint_conversion.verify import verify
from tests.conversion.legacy_support import only_args_config, write_legacy
from tests.conversion.support import (
    assert_same_tensors,
    change_json,
    hugging_face_config,
    random_tensors,
    read,
    refused,
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


@pytest.fixture(params=["megatron", "megatron-legacy"])
def source(tmp_path, request) -> Path:
    folder = tmp_path / "source"
    if request.param == "megatron":
        write_torch_dist(folder, CONFIG, TENSORS)
    else:
        write_legacy(folder, CONFIG, TENSORS, vocab_multiple=1)
    return folder


torch_dist = pytest.mark.parametrize("source", ["megatron"], indirect=True)


@pytest.mark.parametrize("said_by", ["own config.json", "arguments"])
def test_tokens_are_not_dropped(tmp_path, stale, source, said_by):
    if said_by == "arguments":
        only_args_config(source)
    verb = "has" if said_by == "own config.json" else "have"
    target = tmp_path / "target"
    why = f"7 rows of the embedding, after {BEFORE} by its config.json, would be lost, though the "
    with refused(f"{why}checkpoint's {said_by} {verb} a vocab_size of {AFTER}", "--drop-tokens"):
        convert(source, target, "hf", hf_config=stale)
    assert not target.exists()
    report = convert(source, target, "hf", hf_config=stale, drop_tokens=True)
    assert any("are dropped (--drop-tokens), though" in note for note in report.plan.notes)
    found = read(target)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor[:BEFORE] if name in VOCABULARY else tensor)


@torch_dist
def test_verify_and_inspect(tmp_path, stale, source, capsys):
    small = {n: t[:BEFORE] if n in VOCABULARY else t for n, t in TENSORS.items()}
    before = write_hugging_face(tmp_path / "before", tiny_config(vocab_size=BEFORE), small)
    with refused("7 rows of the embedding"):
        verify(source, before, hf_config=stale, logits=False)
    assert verify(source, before, hf_config=stale, drop_tokens=True, logits=False).accepted
    words = [str(source), "--hf-config", str(stale)]
    assert cli.main(["inspect", *words]) == cli.REFUSED
    assert cli.main(["inspect", *words, "--drop-tokens"]) == cli.DONE
    assert cli.main(["verify", *words[:1], str(before), *words[1:], "--no-logits"]) == cli.REFUSED
    assert "7 rows of the embedding" in capsys.readouterr().err


@torch_dist
def test_own_config_and_arguments_contradict(source):
    """Without any ``hf_config``."""
    change_json(source / "release/hugging_face/config.json", vocab_size=BEFORE)
    with refused(f"arguments have a vocab_size of {AFTER}"):
        open_checkpoint(source)
    assert open_checkpoint(source, drop_tokens=True).config.vocab_size == BEFORE


@pytest.mark.parametrize(("multiple", "tp", "fits"), [(4, 2, True), (7, 1, False), (1, 4, False)])
@torch_dist
def test_more_rows_than_padding_can_be(stale, source, monkeypatch, multiple, tp, fits):
    """Where Megatron's arguments hold no vocabulary but the padded one."""
    only_args_config(source)
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
    with refused(f"padding to a multiple of {multiple * tp} ", f"{multiple} by ", f"{tp}) has few"):
        open_checkpoint(source, hf_config=stale)


def test_more_entries_than_tokens(tmp_path):
    """A config.json with padding in its vocabulary loses nothing."""
    source = tmp_path / "source"
    write_torch_dist(source, CONFIG, TENSORS, vocab_multiple=128)
    larger = tmp_path / "larger.json"
    larger.write_text(json.dumps(hugging_face_config(vocab_size=128)))
    assert read(source, hf_config=larger)["lm_head.weight"].shape[0] == 128


def test_option_without_a_megatron_checkpoint(tmp_path):
    folder = write_hugging_face(tmp_path / "model", CONFIG, TENSORS)
    for refuse in (
        lambda: open_checkpoint(folder, drop_tokens=True),
        lambda: verify(folder, folder, drop_tokens=True),
    ):
        with refused("--drop-tokens is for Megatron checkpoints"):
            refuse()


def test_adapter_beside_the_weights(tmp_path):
    """transformers would add it to them."""
    folder = write_hugging_face(tmp_path / "model", CONFIG, TENSORS)
    (folder / "adapter_config.json").write_text("{}")
    assert open_checkpoint(folder).config == CONFIG
    (folder / "adapter_model.bin").write_bytes(b"x")
    with refused("PEFT adapter (adapter_model.bin) beside"):
        open_checkpoint(folder)


TIED = tiny_config(tie_word_embeddings=True, num_nextn_predict_layers=1)
TIED_TENSORS = random_tensors(TIED)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DIFFERENT = f"{HEAD}: must be equal where tie_word_embeddings is true, but differ", "difference"


def with_head(head: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**TIED_TENSORS, HEAD: head}


def changed(row: int) -> torch.Tensor:
    """The embedding with one other bit."""
    head = TIED_TENSORS[EMBEDDING].clone()
    head.view(torch.int16)[row, -1] ^= 1
    return head


@pytest.fixture
def equal(tmp_path):
    return write_hugging_face(tmp_path / "equal", TIED, with_head(TIED_TENSORS[EMBEDDING].clone()))


@pytest.fixture(params=[0, TIED.vocab_size - 1])
def different(tmp_path, request):
    return write_hugging_face(tmp_path / "different", TIED, with_head(changed(request.param)))


def test_tied_equal(equal, tmp_path):
    """It is there once in every target, and ``verify`` finds the same model."""
    assert_same_tensors(read(equal), TIED_TENSORS)
    for source, to in (("equal", "absorbed"), ("absorbed", "hf"), ("equal", "megatron")):
        convert(tmp_path / source, tmp_path / to, to)
        assert verify(equal, tmp_path / to, logits=False).accepted
        assert not {HEAD, "output_layer.weight"} & set(open_checkpoint(tmp_path / to).stored)
        assert_same_tensors(read(tmp_path / to), TIED_TENSORS)
    assert verify(tmp_path / "hf", logits=False).accepted


def test_tied_different(different, equal, tmp_path):
    """Refused before the target appears, also by ``verify``, which reads in parts."""
    with refused(*DIFFERENT):
        convert(different, tmp_path / "absorbed", "absorbed")
    assert not (tmp_path / "absorbed").exists()
    with refused(*DIFFERENT):
        verify(different, equal, logits=False)


def test_tied_a_part(different, equal):
    """Only what is asked for is read and compared, from both files."""
    half = TIED.vocab_size // 2
    for folder, fails in ((equal, False), (different, True)):
        whole = open_checkpoint(folder).hugging_face_tensors()[EMBEDDING]
        parts = whole.chunk(2)
        assert all(part.peak <= whole.peak // 2 for part in parts)
        failed = 0
        for i, part in enumerate(parts):
            with ReadSession() as session:
                try:
                    values = part.load(session)
                except CheckpointError:
                    failed += 1
                else:
                    assert torch.equal(values, TIED_TENSORS[EMBEDDING][i * half : (i + 1) * half])
        assert failed == fails


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (TIED_TENSORS[EMBEDDING].float(), "torch.float32"),
        (
            torch.cat([TIED_TENSORS[EMBEDDING], TIED_TENSORS[EMBEDDING][:1]]),
            f"{TIED.vocab_size + 1}",
        ),
    ],
)
def test_tied_of_another_kind(tmp_path, head, found):
    folder = write_hugging_face(tmp_path / "model", TIED, with_head(head))
    with refused(f"{HEAD} is ", found, "tie_word_embeddings says"):
        open_checkpoint(folder).hugging_face_tensors()


@pytest.mark.parametrize("bits", ["equal", "different"])
def test_tied_megatron(tmp_path, config, tensors, bits):
    """An output layer in a distributed checkpoint of a model that its config.json calls tied."""
    head = tensors[EMBEDDING].clone()
    if bits == "different":
        head.view(torch.int16)[3, 0] ^= 1
    write_torch_dist(tmp_path / "model", config, {**tensors, HEAD: head}, vocab_multiple=128)
    tied = tiny_config(tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(tied.hugging_face))
    how = {"hf_config": tmp_path / "config.json"}
    if bits == "different":
        with refused("output_layer.weight: must be equal"):
            read(tmp_path / "model", **how)
        return
    del tensors[HEAD]
    assert_same_tensors(read(tmp_path / "model", **how), tensors)


def test_not_tied(tmp_path, config, tensors):
    """Then it is a weight of its own, equal or not."""
    tensors[HEAD] = tensors[EMBEDDING].clone()
    folder = write_hugging_face(tmp_path / "model", config, tensors)
    assert_same_tensors(read(folder), tensors)
