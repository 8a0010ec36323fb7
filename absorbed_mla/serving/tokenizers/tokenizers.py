"""Tokenizers of ``LLM``: Hugging Face's, or bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from absorbed_mla.serving.chat_messages import Message, with_argument_texts
from absorbed_mla.serving.tokenizers.detokenizer import ByteStream, TextStream, hugging_face_stream
from absorbed_mla.serving.tokenizers.folder import load_tokenizer
from absorbed_mla.serving.tokenizers.token_bytes import TokenBytes

# Any of these files in a folder means that transformers finds a tokenizer there.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer(Protocol):
    """What ``LLM`` needs of a tokenizer.

    Attributes:
        vocab_size: Number of token ids, from 0.
        end_tokens: Tokens that end a text.
    """

    vocab_size: int
    end_tokens: tuple[int, ...]

    def encode(self, text: str, *, begin: bool | None = None) -> list[int]:
        """Token ids of a prompt.

        Args:
            begin: None: with the tokens that the model expects in front of it; False: without.
        """
        ...

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool) -> TextStream:
        """Turns the tokens after ``prompt`` into text."""
        ...

    def token_text(self, token: int) -> str:
        """Text of one token alone."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 that a token adds in the middle of a text; it may be part of a character."""
        ...

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: If there is no chat template.
        """
        ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; token 256 ends a text, and none begins it."""

    vocab_size = 257
    longest_token = 1
    end_tokens = (256,)
    begin_token: int | None = None

    def encode(self, text: str, *, begin: bool | None = None) -> list[int]:
        """The bytes; lone surrogates stand for bytes that are no UTF-8."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """See :class:`Tokenizer`."""
        return ByteStream(self.end_tokens[0])

    def token_text(self, token: int) -> str:
        """The character; a replacement character for part of one, nothing for the end."""
        stream = ByteStream(self.end_tokens[0])
        return stream.push([token]) + stream.finish()

    def token_bytes(self, token: int) -> bytes:
        """The byte; none for the end."""
        return bytes([token]) if token < 256 else self.token_text(token).encode()

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """Not available.

        Raises:
            ValueError: Always.
        """
        raise ValueError("tokenizer='bytes' has no chat template; use generate with a prompt")


class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``.

    Args:
        tokenizer: ``transformers`` tokenizer.
        end_tokens: Token ids that end a text, besides the tokenizer's own.

    Attributes:
        of_transformers: The tokenizer that it was given.
        begin_token: The token that begins a text, if the tokenizer has one.
        special_tokens: Those that are no text.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int] = ()) -> None:
        self.of_transformers = self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self.special_tokens = self._token_bytes.special
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # transformers would do it at the first text, when another thread may have a second one.
            backend.no_truncation()
            backend.no_padding()
        own = tokenizer.eos_token_id
        self.end_tokens = tuple(dict.fromkeys([*([] if own is None else [own]), *end_tokens]))
        self.begin_token: int | None = tokenizer.bos_token_id
        self.vocab_size = len(tokenizer)

    @classmethod
    def from_folder(
        cls, folder: Path, end_tokens: Sequence[int] = (), *, trust_remote_code: bool = False
    ) -> HuggingFaceTokenizer:
        """Load from a local folder; see :func:`load_tokenizer`.

        Raises:
            ValueError: If transformers cannot, or would have to run code that it may not.
        """
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        except ValueError as error:
            raise ValueError(f"tokenizer: {error}") from error
        return cls(tokenizer, end_tokens)

    @functools.cached_property
    def longest_token(self) -> int | None:
        """Most characters of a text that one token stands for; None if nobody knows."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        # Others have a token for any number of characters that they do not know.
        if backend is None or not self._token_bytes.takes_all_text:
            return None
        normalizer = backend.normalizer
        for text in (" " * 9, "\t\n" * 9, "e\u0301" * 9) if normalizer is not None else ():
            # It loses characters before there are tokens.
            if len(normalizer.normalize_str(text).encode()) < len(text):
                return None
        # A character of a name is a byte, or a character of the text.
        return max(map(len, backend.get_vocab(with_added_tokens=True)), default=None)

    def encode(self, text: str, *, begin: bool | None = None) -> list[int]:
        """See :class:`Tokenizer`.

        Args:
            text: Lone surrogates stand for bytes that are no UTF-8, which the tokenizer does not
                get to see.
            begin: Whether ``begin_token`` comes first, without any other special token; None:
                those that the tokenizer adds by itself.

        Raises:
            ValueError: If there is no ``begin_token``.
        """
        text = text.encode(errors="surrogateescape").decode(errors="replace")
        if begin is None:
            return list(self._tokenizer(text)["input_ids"])
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not begin:
            return tokens
        if self.begin_token is None:
            raise ValueError("the tokenizer has no token that begins a text")
        return [self.begin_token, *tokens]

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """See :class:`Tokenizer`."""
        return hugging_face_stream(
            self._tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            token_bytes=self._token_bytes,
        )

    def token_text(self, token: int) -> str:
        """See :class:`Tokenizer`."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)

    def token_bytes(self, token: int) -> bytes:
        """See :class:`Tokenizer`."""
        return self._token_bytes.of(token)

    def chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """See :class:`Tokenizer`; ``options`` go to ``apply_chat_template``."""
        found = self._of_template(messages, tokenize=True, return_dict=True, **options)
        return list(found["input_ids"])

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation, whose tokens without any in front of it :meth:`chat` has.

        Args:
            options: For the chat template.

        Raises:
            ValueError: If there is none.
        """
        return self._of_template(messages, tokenize=False, **options)

    def _of_template(self, messages: Sequence[Message], **options: Any) -> Any:
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; use generate with a prompt of your own"
            )
        template = self.chat_template
        if options.get("tools") and "tools" not in template:
            raise ValueError("tools must not be given: the model's chat template has none")
        options = {"add_generation_prompt": True, **options}
        apply = self._tokenizer.apply_chat_template
        # Templates add something to the content, also of a message that has only tool calls.
        given = [m if m.get("content") is not None else {**m, "content": ""} for m in messages]
        try:
            return apply(given, **options)
        except TypeError:
            as_texts = with_argument_texts(given)
            if as_texts == given:
                raise
            return apply(as_texts, **options)

    @property
    def chat_template(self) -> str:
        """The text of the chat template, or of all that there are; ``""`` without one."""
        found = self._tokenizer.chat_template or ""
        return "".join(found.values()) if isinstance(found, dict) else found


def open_tokenizer(
    given: str | Path | Tokenizer | None,
    folder: Path | None,
    end_tokens: Sequence[int] = (),
    *,
    trust_remote_code: bool = False,
) -> Tokenizer | None:
    """The tokenizer that ``LLM(tokenizer=...)`` asks for.

    Args:
        given: A folder, ``"bytes"``, a tokenizer of transformers, one with the methods of
            :class:`Tokenizer`, or None for the model's own.
        folder: Of the model's own tokenizer, if it may have one.
        end_tokens: That end the model's texts besides the tokenizer's own.
        trust_remote_code: Whether a tokenizer may run Python code of its folder.

    Returns:
        None if the model has none.

    Raises:
        ValueError: If it cannot be loaded.
    """
    if given == "bytes":
        return ByteTokenizer()
    if given is None:
        if folder is None or not any((folder / name).exists() for name in _FILES):
            return None
        return HuggingFaceTokenizer.from_folder(
            folder, end_tokens, trust_remote_code=trust_remote_code
        )
    if isinstance(given, str | Path):
        if not Path(given).is_dir():
            raise ValueError(f"tokenizer must be a folder or 'bytes', got {str(given)!r}")
        return HuggingFaceTokenizer.from_folder(
            Path(given), end_tokens, trust_remote_code=trust_remote_code
        )
    if hasattr(given, "apply_chat_template"):
        return HuggingFaceTokenizer(given, end_tokens)
    return given
