"""Tokenizers of Kimi-K2 and Moonlight without their code, against BPE as tiktoken does it.

If these fail, models read other tokens than they were trained with, or code of a checkpoint runs.
"""

import base64
import functools
import json
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
from tests.support.tokenizers import bytes_of_characters
from training.data import build_tokenizer

DOCS = Path(__file__).resolve().parents[4] / "docs"
# Beside the docs, which are English.
TEXTS = [
    "中文English中文 GPT4发布于2023年3月14日,共有1750亿个参数。々〆〇 カタカナー 한국어",
    "I'll DON'T we'Ve '\u017f it's'S ABCdef'S ǅ ʰx ́a naïve Ünïcödé ﷺ İıß",
    "  1234567 12,345.67\t\tx \r\n\r\n \n  y\u3000z\x85\u2028 \u00a0!?…—“x” ",
    "🙂👩‍👩‍👧‍👦 \x00\x7f \ufeff\u200b x" + " " * 70 + "\n" * 5,
    "<|im_user|>user<|im_middle|>hi<|im_end|><|reserved_token_NUMBER|>[BOS]<tool><|im_use",
    "",
]
UNREACHED = "qzxvw"
# As its code has it: moonshotai/Kimi-K2-Instruct, tokenization_kimi.py.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
NAMED = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_middle|>": 17,
    "<tool>": 9,
}
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"


def corpus() -> list[str]:
    return [path.read_text() for path in sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Learned from the docs, and one that no merge leads to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*corpus(), *TEXTS * 20], trainer)
    table = bytes_of_characters()
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(table[character] for character in word) for word, _ in words]
    tokens.append(UNREACHED.encode())
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, ranks: dict[bytes, int], code: str | None = None, **fields) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    names = {len(ranks) + i: name for name, i in NAMED.items()}
    config = {
        "added_tokens_decoder": {
            str(i): {"content": name, "special": name != "<tool>"} for i, name in names.items()
        },
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>", "<|im_middle|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]", "__type": "AddedToken"},
        "tokenizer_class": "TikTokenTokenizer",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | fields))
    if code is not None:
        (folder / "tokenization_kimi.py").write_text(code)
    return folder


@pytest.fixture
def folder(tmp_path, ranks) -> Path:
    return write(tmp_path / "kimi", ranks)


class Reference:
    """What tiktoken does: cut at special tokens and by the pattern, then merge by rank."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        self._ranks, first = ranks, len(ranks)
        self._special = {f"<|reserved_token_{first + i}|>": first + i for i in range(256)}
        for name, i in NAMED.items():
            del self._special[f"<|reserved_token_{first + i}|>"]
            self._special[name] = first + i
        names = map(regex.escape, self._special)
        self._parts = regex.compile(f"({'|'.join(names)})")
        self._words = regex.compile(PATTERN, regex.V1)
        self._merged = functools.cache(self._merge)

    def encode(self, text: str) -> list[int]:
        found = []
        for part in self._parts.split(text):
            if part in self._special:
                found.append(self._special[part])
                continue
            for word in self._words.findall(part):
                found += self._merged(word.encode())
        return found

    def _merge(self, word: bytes) -> list[int]:
        if word in self._ranks:
            return [self._ranks[word]]
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            ranks = [self._ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:])]
            if not ranks or min(ranks) == 1 << 30:
                return [self._ranks[part] for part in parts]
            i = ranks.index(min(ranks))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


class TestTokens:
    def test_of_a_corpus(self, folder, ranks):
        """The docs, and texts for each part of the pattern; decoding gives them back."""
        tokenizer, reference = open_tokenizer(folder, None), Reference(ranks)
        texts = [text.replace("NUMBER", str(len(ranks) + 5)) for text in TEXTS]
        for text in [*corpus(), *texts, f"{UNREACHED} {UNREACHED}s"]:
            tokens = tokenizer.encode(text)
            assert tokens == reference.encode(text)
            assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == text
            stream = tokenizer.stream([], skip_special_tokens=False)
            assert stream.push(tokens) + stream.finish() == text

    def test_special_tokens(self, folder, ranks):
        tokenizer, first = open_tokenizer(folder, None, (7,)), len(ranks)
        assert (tokenizer.begin_token, tokenizer.end_tokens) == (first, (first + 1, 7))
        assert tokenizer.vocab_size == first + 256
        tokens = tokenizer.encode("a<tool>b<|im_user|>c<|im_end|>")
        assert tokenizer.stream([]).push(tokens) == "a<tool>bc"
        assert tokenizer.token_text(first + 4) == f"<|reserved_token_{first + 4}|>"

    @pytest.mark.parametrize("as_file", [False, True])
    def test_chat(self, folder, as_file):
        if as_file:
            (folder / "chat_template.jinja").write_text(f"{TEMPLATE}!")
        tokenizer = open_tokenizer(None, folder)
        expected = "<|im_user|>hi<|im_end|>" + "!" * as_file
        assert tokenizer.chat([{"role": "user", "content": "hi"}]) == tokenizer.encode(expected)

    def test_to_train_with(self, folder, ranks):
        assert build_tokenizer(str(folder)).encode("a", begin=False) == [ranks[b"a"]]


class TestCode:
    """Is read, and does not run unless it is trusted."""

    STOP = "raise SystemExit('it ran')\n"

    @pytest.mark.parametrize("class_name", ["tokenization_kimi", "moonshotai/K--tokenization_kimi"])
    def test_of_kimi(self, tmp_path, ranks, class_name):
        patterns = "\n".join(f'r"""{one}""",' for one in regex.split(r"\|(?=\[|\\|\s)", PATTERN))
        code = f"{self.STOP}PATTERNS = [\n{patterns}\n]\n"
        named = {"AutoTokenizer": f"{class_name}.TikTokenTokenizer"}
        folder = write(tmp_path / "kimi", ranks, code, auto_map=named)
        assert open_tokenizer(folder, None).encode("a") == [ranks[b"a"]]

    def test_special_tokens_that_are_none(self, tmp_path, ranks):
        """They get no number of their own, which the model would not know."""
        others = ["<|im_end|>", "<|nowhere|>"]
        folder = write(
            tmp_path / "kimi", ranks, additional_special_tokens=others, bos_token="<|begin|>"
        )
        tokenizer = open_tokenizer(folder, None)
        assert (tokenizer.vocab_size, tokenizer.begin_token) == (len(ranks) + 256, None)

    def test_without_its_name(self, tmp_path, ranks):
        folder = write(tmp_path / "kimi", ranks, auto_map=None)
        assert open_tokenizer(folder, None).encode("中文a")[-1] == ranks[b"a"]

    def test_other_code(self, tmp_path, ranks):
        folder = write(tmp_path / "kimi", ranks, f"{self.STOP}P = '{PATTERN[:-3]}'")
        with pytest.raises(ValueError, match=r"kimi\.py does not cut texts as Kimi-K2's"):
            open_tokenizer(folder, None)

    def test_other_classes(self, tmp_path, ranks):
        named = {"AutoTokenizer": "tokenization_kimi.Other"}
        folder = write(tmp_path / "kimi", ranks, self.STOP, auto_map=named)
        with pytest.raises(ValueError, match=r"is Python code \(tokenization_kimi.Other\).*False$"):
            open_tokenizer(folder, None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("not base64 here\n", "tiktoken.model is not of tokens in base64 and ranks"),
        ("YQ== x\n", "tiktoken.model is not of tokens in base64 and ranks"),
        ("YQ== 0\nYg== 0\n", "must give each of its tokens a rank of its own, from 0"),
        ("YQ== 0\nYQ== 1\n", "must give each of its tokens a rank of its own, from 0"),
        ("YQ== 0\nYg== 1\n", "has no token for the byte 0"),
    ],
)
def test_broken_files(folder, text, error):
    (folder / "tiktoken.model").write_text(text)
    with pytest.raises(ValueError, match=error):
        open_tokenizer(folder, None)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        (3, "'a' is not free for"),
        (-1, "must have numbers from .*, got"),
        (1 << 16, "none beyond .*, got"),
    ],
)
def test_numbers_that_are_taken(tmp_path, ranks, place, error):
    """Or that are too many to fill the gap up to them."""
    added = {str(len(ranks) + place): {"content": "a"}}
    folder = write(tmp_path / "kimi", ranks, added_tokens_decoder=added)
    with pytest.raises(ValueError, match=f"added_tokens_decoder.* {error}"):
        open_tokenizer(folder, None)
