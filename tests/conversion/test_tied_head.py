"""Tied models whose output layer is stored all the same, as DeepSpeed and older trainers do."""

from __future__ import annotations

import json

import pytest
import torch

from checkpoint_conversion.convert import convert
from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.lazy_tensor import ReadSession
from checkpoint_conversion.verify import verify
from tests.conversion.support import (
    assert_same_tensors,
    random_tensors,
    read,
    refused,
    tiny_config,
    write_hugging_face,
    write_torch_dist,
)

TIED = tiny_config(tie_word_embeddings=True, num_nextn_predict_layers=1)
TENSORS = random_tensors(TIED)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DIFFERENT = f"{HEAD}: must be equal where tie_word_embeddings is true, but differ", "difference"


def with_head(head: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**TENSORS, HEAD: head}


def changed(row: int) -> torch.Tensor:
    """The embedding with one other bit."""
    head = TENSORS[EMBEDDING].clone()
    head.view(torch.int16)[row, -1] ^= 1
    return head


@pytest.fixture
def equal(tmp_path):
    return write_hugging_face(tmp_path / "equal", TIED, with_head(TENSORS[EMBEDDING].clone()))


@pytest.fixture(params=[0, TIED.vocab_size - 1])
def different(tmp_path, request):
    return write_hugging_face(tmp_path / "different", TIED, with_head(changed(request.param)))


def test_equal(equal, tmp_path):
    """It is there once in every target, and ``verify`` finds the same model."""
    assert_same_tensors(read(equal), TENSORS)
    for source, to in (("equal", "absorbed"), ("absorbed", "hf"), ("equal", "megatron")):
        convert(tmp_path / source, tmp_path / to, to)
        assert verify(equal, tmp_path / to, logits=False).accepted
        assert not {HEAD, "output_layer.weight"} & set(open_checkpoint(tmp_path / to).stored)
        assert_same_tensors(read(tmp_path / to), TENSORS)
    assert verify(tmp_path / "hf", logits=False).accepted


def test_different(different, equal, tmp_path):
    """Refused before the target appears, also by ``verify``, which reads in parts."""
    with refused(*DIFFERENT):
        convert(different, tmp_path / "absorbed", "absorbed")
    assert not (tmp_path / "absorbed").exists()
    with refused(*DIFFERENT):
        verify(different, equal, logits=False)


def test_a_part(different, equal):
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
                    assert torch.equal(values, TENSORS[EMBEDDING][i * half : (i + 1) * half])
        assert failed == fails


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (TENSORS[EMBEDDING].float(), "torch.float32"),
        (torch.cat([TENSORS[EMBEDDING], TENSORS[EMBEDDING][:1]]), f"{TIED.vocab_size + 1}"),
    ],
)
def test_of_another_kind(tmp_path, head, found):
    folder = write_hugging_face(tmp_path / "model", TIED, with_head(head))
    with refused(f"{HEAD} is ", found, "tie_word_embeddings says"):
        open_checkpoint(folder).hugging_face_tensors()


@pytest.mark.parametrize("bits", ["equal", "different"])
def test_megatron(tmp_path, config, tensors, bits):
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
