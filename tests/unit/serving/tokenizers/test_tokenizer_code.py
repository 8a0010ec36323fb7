"""Tokenizers that are Python code of their folder: it runs if it is trusted, and never else."""

import fcntl
import json
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils as dynamic_modules
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from absorbed_mla import LLM
from absorbed_mla.serving.llm_options import LLMOptions
from absorbed_mla.serving.server import cli
from absorbed_mla.serving.tokenizers.folder import LOCK_FILE, code_of
from absorbed_mla.serving.tokenizers.tokenizers import open_tokenizer
from tests.conversion.support import random_tensors, tiny_config, write_hugging_face
from tests.support.tokenizers import byte_level
from training.data import build_tokenizer

# Words are tokens; importing it leaves a file.
CODE = """\
from pathlib import Path
from transformers import PreTrainedTokenizer

Path({mark!r}).write_text("ran")

class Words(PreTrainedTokenizer):
    vocab_files_names = {{}}

    def __init__(self, **options):
        self.words = ["<end>", "the", "fox"]
        super().__init__(eos_token="<end>", **options)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {{word: i for i, word in enumerate(self.words)}}

    def _tokenize(self, text, **options):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, index):
        return self.words[index]

    def save_vocabulary(self, *_, **__):
        return ()
"""


@pytest.fixture
def mark(tmp_path, monkeypatch) -> Path:
    """A file that is there once the code has run; nobody is asked whether it may."""

    def ask(*_):
        raise AssertionError("nobody may be asked")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(dynamic_modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "ran"


def write_code(folder: Path, mark: Path) -> None:
    (folder / "tokenization_words.py").write_text(CODE.format(mark=str(mark)))
    fields = {
        "tokenizer_class": "Words",
        "auto_map": {"AutoTokenizer": ["tokenization_words.Words", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.fixture
def folder(tmp_path, mark) -> Path:
    path = tmp_path / "words"
    path.mkdir()
    write_code(path, mark)
    return path


REFUSAL = r"is Python code \(tokenization_words.Words\).*trust_remote_code=True .*, got False"


def test_refused(folder, mark):
    with pytest.raises(ValueError, match=f"^tokenizer: the tokenizer in .*{REFUSAL}"):
        open_tokenizer(folder, None)
    with pytest.raises(ValueError, match=f"^--tokenizer: the tokenizer in .*{REFUSAL}"):
        build_tokenizer(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "unknown"])
def test_refused_beside_a_model(folder, mark, model_type):
    """Also where transformers would take a tokenizer of its own for the model's type instead."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match=REFUSAL):
        open_tokenizer(None, folder)
    assert not mark.exists()


def test_trusted(folder, mark):
    found = open_tokenizer(folder, None, trust_remote_code=True)
    assert found.encode("the fox") == [1, 2] and found.end_tokens == (0,)
    assert mark.read_text() == "ran"
    assert build_tokenizer(str(folder), True).encode("fox the", begin=False) == [2, 1]


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_the_config(tmp_path, mark, trusted):
    """A tokenizer without code is loaded without that of its model's config."""
    words = Tokenizer(WordLevel({"<end>": 0, "the": 1, "fox": 2}, unk_token="<end>"))
    words.pre_tokenizer = Whitespace()
    folder = tmp_path / "plain"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    fields = {"model_type": "other", "auto_map": {"AutoConfig": "configuration_other.Other"}}
    (folder / "config.json").write_text(json.dumps(fields))
    code = f"""
from pathlib import Path
from transformers import PreTrainedConfig
Path({str(mark)!r}).write_text("ran")
class Other(PreTrainedConfig):
    model_type = "other"
"""
    (folder / "configuration_other.py").write_text(code)
    found = open_tokenizer(folder, None, trust_remote_code=trusted)
    assert found.encode("the fox") == [1, 2]
    assert mark.exists() == trusted


@pytest.mark.parametrize("trusted", [False, True])
def test_one_process_at_a_time(folder, mark, monkeypatch, trusted):
    """Whoever comes meanwhile waits at the lock, which is free afterwards."""
    cache = Path(dynamic_modules.HF_MODULES_CACHE)

    def is_locked() -> bool:
        cache.mkdir(exist_ok=True)
        with open(cache / LOCK_FILE, "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    load, found = AutoTokenizer.from_pretrained, []

    def watched(*args, **options):
        found.append(is_locked())
        return load(*args, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", watched)
    if not trusted:
        byte_level().save_pretrained(folder)
    open_tokenizer(folder, None, trust_remote_code=trusted)
    assert found.pop() is trusted and not is_locked()
    build_tokenizer(str(folder), trusted)
    assert found.pop() is trusted and not is_locked()


def test_a_cache_without_a_lock(folder, mark, caplog):
    (Path(dynamic_modules.HF_MODULES_CACHE) / LOCK_FILE).mkdir(parents=True)
    assert open_tokenizer(folder, None, trust_remote_code=True).encode("fox") == [2]
    assert f"cannot lock {dynamic_modules.HF_MODULES_CACHE} (" in caplog.text


def test_code_that_fails(folder, mark):
    (folder / "tokenization_words.py").write_text("raise RuntimeError('no such device')")
    with pytest.raises(ValueError, match=f"cannot load a tokenizer from {folder}: no such device"):
        open_tokenizer(folder, None, trust_remote_code=True)


def test_llm_and_server(tmp_path, mark, capfd, monkeypatch):
    """Before any process of the model starts, in both directions."""
    # It would be that of all tests that follow.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1)
    model = write_hugging_face(tmp_path / "model", config, random_tensors(config))
    write_code(model, mark)
    with pytest.raises(ValueError, match=REFUSAL):
        LLM(model)
    assert not mark.exists()
    (model / "tokenization_words.py").write_text("raise RuntimeError('it ran')")
    with pytest.raises(ValueError, match="it ran"):
        LLM(model, trust_remote_code=True)
    pytest.importorskip("starlette", reason="the server is not installed")
    for words, error in (
        ((), "trust_remote_code=True (--trust-remote-code)"),
        (("--trust-remote-code",), "it ran"),
    ):
        assert cli.main([str(model), "--port", "0", *words]) == 2
        assert error in capfd.readouterr().err


@pytest.mark.parametrize("value", ["false", 2, None])
def test_option(value):
    """A string is no permission."""
    with pytest.raises(ValueError, match="trust_remote_code must be one of False, True, got"):
        LLMOptions(trust_remote_code=value)


@pytest.mark.parametrize(
    ("file", "auto_map", "found"),
    [
        ("tokenizer_config.json", {"AutoTokenizer": ["slow.A", "fast.B"]}, "fast.B"),
        ("tokenizer_config.json", {"AutoTokenizer": ["slow.A", None]}, "slow.A"),
        ("tokenizer_config.json", {"AutoTokenizer": "only.A"}, "only.A"),
        ("tokenizer_config.json", ["slow.A", None], "slow.A"),
        ("config.json", {"AutoTokenizer": ["slow.A", None]}, "slow.A"),
        ("config.json", {"AutoModel": "model.A"}, None),
        ("tokenizer_config.json", {"AutoTokenizer": None}, None),
        ("tokenizer_config.json", None, None),
    ],
)
def test_where_code_is_named(tmp_path, file, auto_map, found):
    (tmp_path / file).write_text(json.dumps({"auto_map": auto_map}))
    assert code_of(tmp_path) == found
