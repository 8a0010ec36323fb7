"""Small Hugging Face tokenizers: byte-level BPE, and SentencePiece-like with word marks."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte and <eos>: the tokenizer of GPT-2 and DeepSeek-V3 without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<eos>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def with_word_marks() -> PreTrainedTokenizerFast:
    """Words begin with a mark that decodes to a space, except at the beginning of a text."""
    words = ["<eos>", "▁", "▁on", "ce", "▁upon", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    # The decoder of Llama.
    mark, space = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([mark, decoders.ByteFallback(), decoders.Fuse(), space])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
