"""Small Hugging Face tokenizers, of the two kinds that models have."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_level() -> PreTrainedTokenizerFast:
    """Every byte a token, as those of GPT-2 and DeepSeek-V3 are without merges; one ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<eos>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def with_word_marks() -> PreTrainedTokenizerFast:
    """Words begin with a mark, which decodes to a space but at the beginning of a text."""
    words = ["<eos>", "▁", "▁on", "ce", "▁upon", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    # Llama's.
    mark, space = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([mark, decoders.ByteFallback(), decoders.Fuse(), space])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
