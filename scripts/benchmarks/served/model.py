"""The model that is served: a Hugging Face checkpoint of random values, and a tokenizer for it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path

from absorbed_mla.serving.tokenizers.token_bytes import bytes_of_characters
from benchmarks import synthetic
from benchmarks.synthetic import Choice

# Options of a benchmark, see ``kit.declare``, and tiny values of them.
MODEL_OPTIONS = "dense_layers=4 moe_layers=4 experts=16 vocab_size=129280 scale_down=1"
TINY_MODEL = "--scale-down 32 --vocab-size 300 --dense-layers 1 --moe-layers 1 --experts 2"
_SHARD = 2 * 10**9
# As byte-level tokenizers write them.
_BYTES = tuple(bytes_of_characters())
# Each has a shard in memory, twice while it is written.
_MOST_PROCESSES = 8


def choice_of(args: argparse.Namespace) -> Choice:
    """Of :data:`MODEL_OPTIONS`."""
    names = ("experts", "dense_layers", "vocab_size", "scale_down")
    sizes = {name: getattr(args, name) for name in names}
    return Choice(layers=args.dense_layers + args.moe_layers, **sizes)


def write_model(folder: Path, choice: Choice) -> dict:
    """Write the checkpoint, unless the folder holds the same one; returns its config.json.

    Raises:
        ValueError: If the folder holds something else, or its disk has no room.
    """
    config = synthetic.model_config(choice)
    if folder.exists():
        file = folder / "config.json"
        if not file.is_file() or json.loads(file.read_text()) != config:
            raise ValueError(f"--model {folder} holds another model; name a folder that is not")
        return config
    synthetic.require_room("--model", folder, synthetic.total_bytes(choice))
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    synthetic.write(part, choice, _SHARD, processes)
    write_tokenizer(part, config["vocab_size"])
    part.replace(folder)
    return config


def token_bytes(config: dict) -> int:
    """Of one token in the latent cache of all layers, in bfloat16."""
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return 2 * config["num_hidden_layers"] * width


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer of bytes and words; 0 begins a text, 1 ends it.

    Every other token is a byte or, if there are more, a word of its own. Outputs of random weights
    are turned into text with the work that a real vocabulary takes.
    """
    plain = {"special": True, "lstrip": False, "rstrip": False, "normalized": False}
    plain |= {"single_word": False}
    special = [{"id": n, "content": text, **plain} for n, text in enumerate(("<s>", "</s>"))]
    vocabulary = {one["content"]: one["id"] for one in special}
    names = [*_BYTES, *map(_word, range(1, vocab_size))]
    vocabulary |= dict(zip(names, range(len(special), vocab_size)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level |= {"use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"byte_fallback": False, "ignore_merges": True, "vocab": vocabulary, "merges": []}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special}
    content |= {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None}
    content |= {"decoder": byte_level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    about |= {"model_max_length": 163840, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def _word(number: int) -> str:
    """A space, as byte-level tokenizers write it, and letters that no other number has."""
    letters = ""
    while number:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return "Ġ" + letters
