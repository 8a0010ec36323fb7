"""Small Hugging Face tokenizers: byte-level BPE, and SentencePiece-like, with byte fallback."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte and <eos>: the tokenizer of GPT-2 and DeepSeek-V3 without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _fast(_byte_level([*alphabet, "<eos>"], []))


def byte_level_across_characters() -> PreTrainedTokenizerFast:
    """As :func:`byte_level`, and tokens that end one Hebrew letter and begin the next one."""
    names = {byte: name for name, byte in bytes_of_characters().items()}
    # Letters are D7 90 to D7 AA.
    merges = [(names[byte], names[0xD7]) for byte in range(0x90, 0xAB)]
    words = [*sorted(names.values()), "<eos>", *map("".join, merges), "<think>", "a b"]
    tokenizer = _byte_level(words, merges, use_regex=False)
    # Their characters are no names of bytes, or not all of them.
    tokenizer.add_tokens(["<think>", "a b", "é→"])
    return _fast(tokenizer)


def _byte_level(words: list[str], merges: list[tuple[str, str]], **how) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **how)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _fast(tokenizer: Tokenizer, **tokens: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eos>", **tokens})


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """Llama's decoder and all 256 bytes; only a and b are words."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", -10.0) for byte in range(256)]
    pieces += [("▁", -2.0)]
    pieces += [(word, -3.0) for word in ("a", "▁a", "b", "\N{REPLACEMENT CHARACTER}")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = _decoder_of_llama()
    return _fast(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def with_word_marks() -> PreTrainedTokenizerFast:
    """Words begin with a mark that decodes to a space, except at the beginning of a text."""
    words = ["<eos>", "▁", "▁on", "ce", "▁upon", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = _decoder_of_llama()
    return _fast(tokenizer)


def _decoder_of_llama() -> decoders.Decoder:
    mark, space = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    return decoders.Sequence([mark, decoders.ByteFallback(), decoders.Fuse(), space])


def bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(b) if b in plain else chr(next(others)): b for b in range(256)}
