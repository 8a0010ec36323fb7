"""Text while it is generated: no half character, no lost space, whatever the tokens are.

If these fail, users see broken characters, or a script dies of a model's bytes.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from absorbed_mla.generation.text import ByteStream, HuggingFaceStream
from tests.support.tokenizers import byte_level, with_word_marks

# The token that ends a document of bytes.
EOD = 256
# One to four bytes each.
TEXT = "aé€😀 ü z"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(stream, tokens) -> list[str]:
    """What each token completes, and what is left."""
    return [*(stream.push([token]) for token in tokens), stream.finish()]


BYTE_LEVEL = byte_level()


@pytest.fixture(params=["bytes", "byte_level"])
def stream_and_tokens(request):
    """A stream for tokens that are bytes, and the tokens of bytes."""
    if request.param == "bytes":
        return ByteStream(EOD), list
    # Its tokens are the bytes in another order.
    order = {BYTE_LEVEL.convert_ids_to_tokens(i): i for i in range(256)}
    names = _names_of_bytes()
    return HuggingFaceStream(BYTE_LEVEL, []), lambda data: [order[names[b]] for b in data]


def _names_of_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def test_half_characters_wait(stream_and_tokens):
    stream, tokens = stream_and_tokens
    found = pieces(stream, tokens(TEXT.encode()))
    assert "".join(found) == TEXT
    # Nothing is held longer than its last byte takes.
    assert [p for p in found if p] == list(TEXT)


def test_a_half_character_at_the_end_is_replaced(stream_and_tokens):
    stream, tokens = stream_and_tokens
    assert pieces(stream, tokens("a€".encode()[:-1])) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("garbage", [b"\xff", b"\xe2\x82", b"\xff\xfe\xff\xff\xff", b"\x80" * 9])
def test_garbage_does_not_swallow_what_follows(stream_and_tokens, garbage):
    stream, tokens = stream_and_tokens
    data = garbage + "€b".encode()
    assert "".join(pieces(stream, tokens(data))) == data.decode(errors="replace")


def test_garbage_is_shown_soon(stream_and_tokens):
    """Only what may still become a character waits."""
    stream, tokens = stream_and_tokens
    assert len(stream.push(tokens(b"\xff" * 20))) >= 20 - 3


@given(st.binary(max_size=40))
def test_any_bytes(data):
    assert "".join(pieces(ByteStream(EOD), data)) == data.decode("utf-8", errors="replace")


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_tokens_of_a_byte_level_tokenizer(tokens):
    stream = HuggingFaceStream(BYTE_LEVEL, [])
    assert "".join(pieces(stream, tokens)) == BYTE_LEVEL.decode(tokens)


def test_tokens_that_are_no_bytes():
    stream = ByteStream(EOD)
    euro = list("€".encode())
    # A half character that the end of the document interrupts; a row of padding.
    assert pieces(stream, [97, *euro[:2], EOD, 98, 300]) == [
        *("a", "", "", REPLACEMENT, "b", REPLACEMENT, "")
    ]


def test_spaces_between_words_stay():
    tokenizer = with_word_marks()
    once, ce, upon = (tokenizer.convert_tokens_to_ids(w) for w in ("▁on", "ce", "▁upon"))
    assert pieces(HuggingFaceStream(tokenizer, [once, ce]), [upon, once, ce]) == [
        *(" upon", " on", "ce", "")
    ]


def test_bytes_for_what_has_no_token():
    tokenizer = with_word_marks()
    on, *euro = (tokenizer.convert_tokens_to_ids(w) for w in ("▁on", "<0xE2>", "<0x82>", "<0xAC>"))
    assert pieces(HuggingFaceStream(tokenizer, [on]), [*euro, on]) == ["", "", "€", " on", ""]
