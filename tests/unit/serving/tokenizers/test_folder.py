"""Tokenizers of ``LLM``: bytes, and a Hugging Face folder with special tokens and a template."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from absorbed_mla import LLM
from absorbed_mla.serving.tokenizers.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    open_tokenizer,
)
from absorbed_mla.serving.weights.checkpoint import end_tokens, open_model, tokenizer_folder
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support.hub_cache import as_snapshot

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps: 2 €"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ suffix }}"
)
MESSAGES = [{"role": "user", "content": "the fox"}]


@pytest.fixture(scope="module")
def made() -> PreTrainedTokenizerFast:
    """Learned from one sentence; every text begins with a special token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>", "<call>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<call>"],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder) -> HuggingFaceTokenizer:
    return open_tokenizer(None, folder, end_tokens=(7, 1))


def streamed(tokenizer, tokens, **options) -> str:
    stream = tokenizer.stream([], **{"skip_special_tokens": True, **options})
    return "".join([*(stream.push([token]) for token in tokens), stream.finish()])


class TestHuggingFace:
    def test_encode(self, tokenizer, made):
        tokens = tokenizer.encode(TEXT)
        assert tokens == made.encode(TEXT) and tokens[0] == 0
        assert all(isinstance(token, int) for token in tokens)
        # It has learned something.
        assert len(tokens) < len(TEXT) / 2

    def test_stream(self, tokenizer):
        """Whole characters, piece by piece: the euro sign has three tokens."""
        tokens = tokenizer.encode(TEXT)
        assert streamed(tokenizer, tokens) == TEXT
        stream = tokenizer.stream(tokens[:5], skip_special_tokens=True)
        rest = "".join(stream.push([token]) for token in tokens[5:])
        before = tokenizer.stream([], skip_special_tokens=True).push(tokens[:5])
        assert before + rest == TEXT

    def test_special_tokens(self, tokenizer):
        tokens = [*tokenizer.encode("fox")[1:], 2, 1]
        assert streamed(tokenizer, tokens) == "fox"
        assert streamed(tokenizer, tokens, skip_special_tokens=False) == "fox<call><eos>"
        assert tokenizer.token_text(2) == "<call>"

    def test_chat(self, tokenizer, made):
        expected = made.encode("<bos><user>the fox<assistant>", add_special_tokens=False)
        assert tokenizer.chat(MESSAGES) == expected
        # Options are the template's, and those of apply_chat_template.
        more = tokenizer.chat(MESSAGES, suffix="dog", add_generation_prompt=False)
        assert more == made.encode("<bos><user>the foxdog", add_special_tokens=False)

    def test_end_tokens(self, tokenizer, folder):
        """The tokenizer's own, and those that the model has besides."""
        assert tokenizer.end_tokens == (1, 7)
        assert open_tokenizer(str(folder), None).end_tokens == (1,)

    def test_size(self, tokenizer, made):
        assert tokenizer.vocab_size == len(made) == max(made.get_vocab().values()) + 1

    def test_given_itself(self, made, tokenizer):
        found = open_tokenizer(made, None)
        assert found.encode(TEXT) == tokenizer.encode(TEXT)
        assert open_tokenizer(found, None) is found

    def test_faults(self, folder, tmp_path):
        copy = shutil.copytree(folder, tmp_path / "copy")
        (copy / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match="the tokenizer has no chat template; use generate"):
            open_tokenizer(copy, None).chat(MESSAGES)
        (copy / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=f"tokenizer: cannot load a tokenizer from {copy}"):
            open_tokenizer(copy, None)


class TestBytes:
    TOKENIZER = ByteTokenizer()

    def test_text(self):
        tokens = self.TOKENIZER.encode("a€")
        assert tokens == [97, 0xE2, 0x82, 0xAC]
        assert streamed(self.TOKENIZER, [*tokens, 256]) == "a€"
        assert streamed(self.TOKENIZER, tokens[:3]) == "a\N{REPLACEMENT CHARACTER}"
        assert self.TOKENIZER.token_text(97) == "a" and self.TOKENIZER.token_text(256) == ""
        assert self.TOKENIZER.token_text(0xE2) == "\N{REPLACEMENT CHARACTER}"

    def test_any_bytes(self):
        """Also those that are no text."""
        text = bytes(range(256)).decode("utf-8", errors="surrogateescape")
        assert self.TOKENIZER.encode(text) == list(range(256))

    def test_chat(self):
        with pytest.raises(ValueError, match="'bytes' has no chat template"):
            self.TOKENIZER.chat(MESSAGES)


class TestOpen:
    def test_bytes(self, folder):
        """Whatever came with the model."""
        assert isinstance(open_tokenizer("bytes", folder), ByteTokenizer)

    def test_none(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert open_tokenizer(None, tmp_path) is None is open_tokenizer(None, None)

    def test_nowhere(self, tmp_path):
        with pytest.raises(ValueError, match="tokenizer must be a folder or 'bytes', got '/nowh"):
            open_tokenizer("/nowhere", tmp_path)


def test_checkpoint(folder, tmp_path):
    """Tokenizer and end tokens are found beside a model's weights."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1, eos_token_id=5)
    path = write_hugging_face(tmp_path / "model", config, random_tensors(config))
    checkpoint = open_model(path)
    assert end_tokens(checkpoint) == (5,)
    assert open_tokenizer(None, tokenizer_folder(checkpoint)) is None
    shutil.copytree(folder, path, dirs_exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    checkpoint = open_model(path)
    assert end_tokens(checkpoint) == (3, 5) and tokenizer_folder(checkpoint) == path
    found = open_tokenizer(None, tokenizer_folder(checkpoint), end_tokens(checkpoint))
    assert found.end_tokens == (1, 3, 5)
    # In the hub's cache, files have other names where they are.
    snapshot = as_snapshot(path, tmp_path)
    checkpoint = open_model(snapshot)
    assert end_tokens(checkpoint) == (3, 5) and tokenizer_folder(checkpoint) == snapshot
    assert open_tokenizer(None, snapshot).encode(TEXT) == found.encode(TEXT)


def test_links_out_of_the_folder(folder, tmp_path):
    """They need an option, of ``LLM`` as of the converter."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1)
    path = write_hugging_face(tmp_path / "model", config, random_tensors(config))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (path / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer.json in .*follow_links=True. allows it"):
        LLM(path)
    # Opened, it has not heads enough.
    with pytest.raises(ValueError, match="tensor_parallel_size must divide"):
        LLM(path, follow_links=True, tensor_parallel_size=64)
