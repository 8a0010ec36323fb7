"""Tokenizers of Kimi-K2 and Moonlight from their files, without the Python code beside them.

``tiktoken.model`` has the tokens of a byte-level BPE with their ranks, ``tokenizer_config.json``
the names of the special tokens after them. How a text is cut before that is in the code alone:
``pat_str``, the same in moonshotai/Moonlight-16B-A3B (``tokenization_moonshot.py``) and in
moonshotai/Kimi-K2-Instruct (``tokenization_kimi.py``) on Hugging Face. Code that a folder has is
read for it, and does not run. Token ids are those of that code, except that it cuts runs of more
than 25,000 characters with no white space, or with nothing else.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absorbed_mla.serving.tokenizers.token_bytes import bytes_of_characters

FILE, CLASS = "tiktoken.model", "TikTokenTokenizer"
# Kimi's has 2.8 MB.
_MAX_BYTES = 64 << 20
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# The alternatives of ``pat_str``.
_PATTERNS = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
# Numbers of special tokens after the ranks. The code has two more, for which the models have no
# embedding.
_NUM_SPECIAL = 256
_MOST_SPECIAL = 1 << 16
# Special tokens by their roles, with what the code takes where tokenizer_config.json has none.
_ROLES = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": None, "pad_token": None}


def load(folder: Path, config: Mapping[str, Any], code: str | None) -> Any:
    """A tokenizer of ``transformers`` with the same token ids.

    Args:
        folder: With ``tiktoken.model``.
        config: The fields of its ``tokenizer_config.json``.
        code: Its class, as ``auto_map`` names it: ``"module.Class"`` or ``"repository--..."``.

    Raises:
        ValueError: If the code cuts texts in another way, or a file is not as expected.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = folder / f"{(code or '').rpartition('--')[2].rpartition('.')[0]}.py"
    if path.is_file():
        text = path.read_text(errors="replace")
        if not all(f'"{pattern}"' in text or f"'{pattern}'" in text for pattern in _PATTERNS):
            raise ValueError(f"{path.name} does not cut texts as Kimi-K2's tokenizer does")
    ranks = _read_ranks(folder / FILE)
    names = {byte: name for name, byte in bytes_of_characters().items()}
    words = {token: "".join(names[byte] for byte in token) for token in ranks}
    merges = [(words[left], words[right]) for left, right in _merges(ranks)]
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    # A word that is a token is that token, however it might be merged.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex("|".join(_PATTERNS)), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()

    given = {int(number): token for number, token in config.get("added_tokens_decoder", {}).items()}
    last = max([len(ranks) + _NUM_SPECIAL - 1, *given])
    if not len(ranks) <= min([last, *given]) <= last < len(ranks) + _MOST_SPECIAL:
        raise ValueError(
            f"added_tokens_decoder must have numbers from {len(ranks)}, and none beyond "
            f"{len(ranks) + _MOST_SPECIAL - 1}, got {min(given)} to {last}"
        )
    added = {
        number: given.get(number, {"content": f"<|reserved_token_{number}|>"})
        for number in range(len(ranks), last + 1)
    }
    tokenizer.add_tokens(
        [
            AddedToken(one["content"], special=one.get("special", False), normalized=False)
            for one in added.values()
        ]
    )
    for number, one in given.items():
        if tokenizer.token_to_id(one["content"]) != number:
            raise ValueError(f"added_tokens_decoder: {one['content']!r} is not free for {number}")
    known = tokenizer.get_vocab().keys()
    roles = {role: _name(config.get(role, default)) for role, default in _ROLES.items()}
    others = map(_name, config.get("additional_special_tokens") or [])
    template = folder / "chat_template.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{role: token for role, token in roles.items() if token in known},
        additional_special_tokens=[token for token in others if token in known],
        chat_template=template.read_text() if template.is_file() else config.get("chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _name(token: Any) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and their ranks: of each line the token in base64, a space, and the rank."""
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_BYTES} bytes")
    lines = [line.split() for line in path.read_bytes().splitlines() if line.strip()]
    try:
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path.name} is not of tokens in base64 and ranks: {error}") from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ValueError(f"{path.name} must give each of its tokens a rank of its own, from 0")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{path.name} has no token for the byte {missing[0]}")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs that become a token, in the order in which BPE looks for them."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
