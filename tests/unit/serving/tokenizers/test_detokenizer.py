"""Text while it is generated: no half character, no lost space, whatever the tokens are.

If these fail, users see broken characters, or a script dies of a model's bytes.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla.serving.tokenizers.detokenizer import ByteStream, hugging_face_stream
from absorbed_mla.serving.tokenizers.token_bytes import TokenBytes
from tests.support.tokenizers import (
    byte_level,
    byte_level_across_characters,
    bytes_of_characters,
    with_byte_fallback,
    with_word_marks,
)

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
    if request.param == "bytes":
        return ByteStream(EOD), list
    # Its tokens are the bytes in another order.
    order = {BYTE_LEVEL.convert_ids_to_tokens(i): i for i in range(256)}
    names = {byte: name for name, byte in bytes_of_characters().items()}
    return hugging_face_stream(BYTE_LEVEL, []), lambda data: [order[names[b]] for b in data]


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
    stream = hugging_face_stream(BYTE_LEVEL, [])
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
    assert pieces(hugging_face_stream(tokenizer, [once, ce]), [upon, once, ce]) == [
        *(" upon", " on", "ce", "")
    ]


def test_bytes_for_what_has_no_token():
    """A wrong byte would make U+FFFD of all of them, so they wait for the end of their run."""
    tokenizer = with_word_marks()
    on, *euro = (tokenizer.convert_tokens_to_ids(w) for w in ("▁on", "<0xE2>", "<0x82>", "<0xAC>"))
    assert pieces(hugging_face_stream(tokenizer, [on]), [*euro, on]) == ["", "", "", "€ on", ""]
    assert pieces(hugging_face_stream(tokenizer, [on]), [*euro, euro[0], on]) == [
        *("", "", "", "", f"{REPLACEMENT * 4} on", "")
    ]


class _Opaque:
    """A tokenizer of which nothing is known but what it decodes, as those with code are."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, tokens, **options) -> str:
        return self._tokenizer.decode(list(tokens), **options)


BYTE_LEVEL_ACROSS, BYTE_FALLBACK = byte_level_across_characters(), with_byte_fallback()
TOKENIZERS = {
    "byte_level": BYTE_LEVEL_ACROSS,
    "opaque_byte_level": _Opaque(BYTE_LEVEL_ACROSS),
    "byte_fallback": BYTE_FALLBACK,
}
# One to four bytes each, among them Hebrew, Tibetan, Cherokee, and parts of emojis.
LETTERS = st.sampled_from("ab é\n\u05d0\u05dc\u0f56\u0f7c\u13a0\U0001f468\u200d\ufffd")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_what_decode_gives(name, data):
    """Texts and any tokens in turn, cut anywhere, whatever is pushed together."""
    tokenizer = TOKENIZERS[name]
    known = tokenizer._tokenizer if isinstance(tokenizer, _Opaque) else tokenizer
    words = st.text(LETTERS, max_size=12).map(
        lambda text: known(text, add_special_tokens=False)["input_ids"]
    )
    # Three that are no tokens, too.
    others = st.lists(st.integers(0, len(known) + 2), max_size=6)
    parts = data.draw(st.lists(st.one_of(words, others), max_size=5))
    tokens = [token for part in parts for token in part]
    tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
    skip = data.draw(st.booleans())
    options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
    expected = tokenizer.decode(tokens, **options)
    stream = hugging_face_stream(tokenizer, [], skip_special_tokens=skip)
    found, start = [], 0
    while start < len(tokens):
        end = start + data.draw(st.integers(1, 3))
        found.append(stream.push(tokens[start:end]))
        start = end
    found.append(stream.finish())
    assert "".join(found) == expected


def test_what_decode_does_not_see():
    """Numbers without a token, and special tokens: bytes on both sides of them are one run."""
    euro = [BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    a, end = BYTE_FALLBACK.convert_tokens_to_ids("a"), BYTE_FALLBACK.eos_token_id
    for other in (len(BYTE_FALLBACK) + 3, end):
        found = pieces(hugging_face_stream(BYTE_FALLBACK, [a]), [*euro[:2], other, euro[2], a])
        assert "".join(found) == "€a"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_piece_ends_within_a_character(name):
    """Every token of a Hebrew word is the end of a letter and the beginning of the next one."""
    text = "a \u05e9\u05dc\u05d5\u05dd\u05e2\u05d5\u05dc\u05dd\u05d0\u05d1 b"
    known = BYTE_FALLBACK if name == "byte_fallback" else BYTE_LEVEL_ACROSS
    tokens = known(text, add_special_tokens=False)["input_ids"]
    if known is BYTE_LEVEL_ACROSS:
        assert sum(REPLACEMENT in known.decode([token]) for token in tokens) > 8
    found = pieces(hugging_face_stream(TOKENIZERS[name], []), tokens)
    assert "".join(found) == text and REPLACEMENT not in "".join(found)


def test_a_long_run_of_bytes_is_shown_while_it_comes():
    """A language without tokens of its own; what has been shown stays, whatever bytes follow."""
    text = "\u0f56\u0f7c" * 40
    tokens = [BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    a, space_a = BYTE_FALLBACK.convert_tokens_to_ids("a"), BYTE_FALLBACK.convert_tokens_to_ids("▁a")
    found = pieces(hugging_face_stream(BYTE_FALLBACK, [a]), [*tokens, tokens[0], space_a])
    assert "".join(found) == f"{text}{REPLACEMENT} a"
    # Half of the text has come before half of the tokens and 64 more have.
    assert len("".join(found[: 120 + 64])) >= 40
    assert max(map(len, found)) <= 64
    # One that is no text from the beginning is U+FFFD for each byte, as in decode.
    broken = [tokens[1], *tokens[:100], a]
    assert "".join(pieces(hugging_face_stream(BYTE_FALLBACK, [a]), broken)) == BYTE_FALLBACK.decode(
        broken
    )


@pytest.mark.parametrize("name", ["byte_level", "opaque_byte_level"])
def test_a_prompt_that_ends_within_a_character(name):
    """The completed character belongs to what follows; one that is not completed does not."""
    names = {byte: character for character, byte in bytes_of_characters().items()}
    euro = [BYTE_LEVEL_ACROSS.convert_tokens_to_ids(names[byte]) for byte in "€".encode()]
    a = BYTE_LEVEL_ACROSS.convert_tokens_to_ids("a")
    tokenizer = TOKENIZERS[name]
    assert pieces(hugging_face_stream(tokenizer, [a, *euro[:2]]), [euro[2], a]) == ["€", "a", ""]
    if name == "byte_level":
        assert pieces(hugging_face_stream(tokenizer, [a, *euro[:2]]), [a]) == ["a", ""]
        assert pieces(hugging_face_stream(tokenizer, [a, *euro[:2]]), []) == [""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL_ACROSS, BYTE_FALLBACK])
def test_bytes_of_tokens_join_to_the_text(tokenizer):
    """Half characters too, and the space that a decoder drops at the beginning of a text."""
    text = "a a \u05dc\u05d5\u05dd é ab\n"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    table = TokenBytes(tokenizer)
    found = b"".join(map(table.of, tokens)).decode()
    assert found.removeprefix(" ") == text
    assert table.of(len(tokenizer) + 5) == b""
    if tokenizer is BYTE_LEVEL_ACROSS:
        added = ["<think>", "a b", "é→", "<eos>"]
        ids = tokenizer.convert_tokens_to_ids(added)
        assert [table.of(one) for one in ids] == [one.encode() for one in added]
