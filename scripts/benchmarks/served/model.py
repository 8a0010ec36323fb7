"""The model that is served: a Hugging Face checkpoint of random values, and a tokenizer for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from benchmarks.synthetic_checkpoint.models import Choice, model_config, stored_tensors
from benchmarks.synthetic_checkpoint.sizes import total_bytes

# Room for the tokenizer, and what the file system needs itself.
_MARGIN = 256 * 10**6
_SHARD = 2 * 10**9
# Each has a shard in memory, twice while it is written.
_MOST_PROCESSES = 8


def write_model(folder: Path, choice: Choice) -> None:
    """Write the checkpoint, unless the folder holds the same one.

    Raises:
        ValueError: If the folder holds something else, or its disk has no room.
    """
    config = model_config(choice)
    if folder.exists():
        if read_config(folder) != config:
            raise ValueError(f"--model {folder} holds another model; name a folder that is not")
        return
    nbytes = total_bytes(config)
    parent = next(path for path in folder.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes + _MARGIN:
        raise ValueError(
            f"--model {folder} needs {nbytes / 1e9:.1f} GB, and only {free / 1e9:.1f} GB are free"
        )
    # torch takes seconds to import, and mistakes do without.
    from benchmarks.synthetic_checkpoint.values import Values, shards, write_checkpoint

    tensors = list(stored_tensors(config))
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_tokenizer(part, config["vocab_size"])
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // 2))
    write_checkpoint(
        part, config, shards(tensors, _SHARD), Values(tensors), lambda file: None, processes
    )
    part.replace(folder)


def read_config(folder: Path) -> dict:
    """The config.json of a checkpoint.

    Raises:
        ValueError: If there is none.
    """
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {folder} has no config.json that can be read: {error}") from None


def token_bytes(config: dict) -> int:
    """Of one token in the latent cache of all layers, in bfloat16."""
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return 2 * config["num_hidden_layers"] * width


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose every token is a word of its own; 0 begins a text, 1 ends it.

    Outputs of random weights are turned into text with the work that a real vocabulary takes.
    """
    special = [
        {"id": token, "content": content, "special": True, "lstrip": False, "rstrip": False}
        | {"normalized": False, "single_word": False}
        for token, content in enumerate(("<s>", "</s>"))
    ]
    vocabulary = {one["content"]: one["id"] for one in special}
    vocabulary |= {_word(token): token for token in range(len(special), vocab_size)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level |= {"use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False}
    model |= {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"byte_fallback": False, "ignore_merges": True, "vocab": vocabulary, "merges": []}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
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
