"""Tokenizers of generate.py: text from and to tokens."""

from __future__ import annotations

from generation.tokenizers import build_text
from tests.support.tokenizers import byte_level

TEXT = "aé€😀 ü z"


def text_of(tokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream(tokens)
    return "".join([*(stream.push([token]) for token in tokens), stream.finish()])


def test_bytes():
    tokenizer = build_text(None)
    tokens = tokenizer.encode(TEXT.encode()).tolist()
    # The end of a document has no text.
    assert text_of(tokenizer, [*tokens, tokenizer.eod]) == TEXT
    assert tokenizer.bos is None


def test_a_folder_of_hugging_face(tmp_path):
    byte_level().save_pretrained(tmp_path)
    tokenizer = build_text(str(tmp_path))
    assert text_of(tokenizer, tokenizer.encode(TEXT.encode()).tolist()) == TEXT
    assert (tokenizer.eod, tokenizer.bos) == (256, None)
