"""A server around a tiny DeepSeek model with a byte-level tokenizer, for clients of their own."""

import json
import os

import pytest

from absorbed_mla import LLM
from tests.support.llm import serving, tiny_folder

KEY = "sk-any"
# Clients look for them where they are not given, and some report to their makers.
os.environ.update(
    OPENAI_API_KEY=KEY, LITELLM_LOCAL_MODEL_COST_MAP="True", HF_HUB_OFFLINE="1", DO_NOT_TRACK="1"
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}assistant: "
)


def write_tokenizer(folder) -> None:
    """One token a byte, its number the byte's; 256 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    about |= {"chat_template": TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model, as transformers has it."""
    made = tiny_folder(tmp_path_factory.mktemp("clients") / "tiny")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="session")
def served(folder):
    options = {"max_num_seqs": 16, "cache_tokens": 8192, "prompt_logprobs": True}
    with LLM(folder, **options) as llm, serving(llm=llm) as made:
        yield made


@pytest.fixture(scope="session")
def url(served) -> str:
    """Of the API, as clients want it."""
    return f"{served.url}/v1"
