"""Tokenizers of ``LLM``: prompts to tokens, and tokens back to text."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing

from absorbed_mla.serving.tokenizers.tokenizers import ByteTokenizer, open_tokenizer
from tests.support.tokenizers import byte_level

TEXT = "aé€😀 ü z"
# A byte that is no UTF-8, as os.fsdecode gives it.
SURROGATE = "a\udcff"


def text_of(tokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream(tokens)
    return "".join([*(stream.push([token]) for token in tokens), stream.finish()])


def test_bytes():
    tokenizer = open_tokenizer("bytes", None)
    assert isinstance(tokenizer, ByteTokenizer)
    tokens = tokenizer.encode(TEXT)
    assert tokens == list(TEXT.encode())
    # The end of a text has no text.
    assert text_of(tokenizer, [*tokens, 256]) == TEXT
    assert tokenizer.encode(SURROGATE) == [97, 255]
    assert tokenizer.begin_token is None


class TestHuggingFace:
    @pytest.fixture
    def tokenizer(self, tmp_path):
        made = byte_level()
        made.add_special_tokens({"bos_token": "<bos>"})
        # As released models: the tokenizer begins every text by itself.
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", made.bos_token_id)]
        )
        made.save_pretrained(tmp_path)
        return open_tokenizer(tmp_path, None)

    def test_text(self, tokenizer):
        assert text_of(tokenizer, tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.encode("a")[0] == tokenizer.begin_token
        assert tokenizer.end_tokens == (256,)

    def test_begin_token(self, tokenizer):
        """``begin`` decides, whatever the tokenizer adds by itself."""
        plain = tokenizer.encode(TEXT, begin=False)
        assert tokenizer.begin_token not in plain
        assert tokenizer.encode(TEXT, begin=True) == [tokenizer.begin_token, *plain]

    def test_bytes_that_are_no_text(self, tokenizer):
        assert tokenizer.encode(SURROGATE) == tokenizer.encode("a\N{REPLACEMENT CHARACTER}")


def test_of_the_model(tmp_path):
    """None is the tokenizer that came with the model, if one did."""
    assert open_tokenizer(None, None) is None
    assert open_tokenizer(None, tmp_path) is None
    byte_level().save_pretrained(tmp_path)
    assert open_tokenizer(None, tmp_path, [7]).end_tokens == (256, 7)


@pytest.mark.parametrize(
    ("name", "error"),
    [("absent", "must be a folder or 'bytes', got"), (".", "cannot load a tokenizer from")],
)
def test_no_tokenizer(tmp_path, name, error):
    with pytest.raises(ValueError, match=f"tokenizer.*{error}"):
        open_tokenizer(tmp_path / name, None)
