"""Loading a tokenizer of ``transformers`` from a folder, with Python code of the folder or not."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absorbed_mla.serving.tokenizers import tiktoken_model

_logger = logging.getLogger(__name__)

# In the folder into which transformers copies Python code.
LOCK_FILE = "absorbed_mla.lock"
_FIELDS = "tokenizer_config.json"


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """A tokenizer of ``transformers``, from local files only.

    Args:
        folder: With the tokenizer's files.
        trust_remote_code: Whether Python modules of the folder may run in this process: those that
            ``auto_map`` names, and what they import. Processes that share transformers' cache, such
            as torchrun's ranks, then load one after the other. If not, those of Kimi-K2 and
            Moonlight are made from their files.

    Raises:
        ValueError: If there is none, it cannot be loaded, or it has code that may not run; nobody
            is asked.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("a tokenizer needs transformers: pip install transformers") from error
    code, why_not = code_of(folder), ""
    if not trust_remote_code and _is_of_tiktoken(folder, code):
        try:
            return tiktoken_model.load(folder, _fields_of(folder), code)
        # As below, of files that do not fit.
        except Exception as error:
            code = code or tiktoken_model.CLASS
            why_not = f"; from its files alone: {type(error).__name__}: {error}"
    if code and not trust_remote_code:
        raise ValueError(
            f"the tokenizer in {folder} is Python code ({code}), which runs with "
            f"trust_remote_code=True (--trust-remote-code) only, got False{why_not}"
        )
    try:
        with _one_process_at_a_time() if trust_remote_code else contextlib.nullcontext():
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
    # transformers, and a tokenizer's own code, raise what they like for files that do not fit.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"cannot load a tokenizer from {folder}: {reason}") from error


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Hold the lock on transformers' copies of Python code, which it writes in place."""
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    with contextlib.ExitStack() as stack:
        try:
            Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(Path(HF_MODULES_CACHE) / LOCK_FILE, "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        # A cache that others have filled may be read-only, and some file systems have no locks.
        except OSError as error:
            _logger.warning(
                "cannot lock %s (%s): start one process alone, if others fail to load the "
                "tokenizer's code",
                HF_MODULES_CACHE,
                error,
            )
        yield


def code_of(folder: Path) -> str | None:
    """The class of a tokenizer that is Python code, as ``auto_map`` names it; None if none is.

    Where both a fast and a slow class are named, it is the fast one, as transformers takes it.

    Raises:
        ValueError: If a file that may name it is no JSON.
    """
    for name in (_FIELDS, "config.json"):
        named = _fields_of(folder, name).get("auto_map")
        found = named.get("AutoTokenizer") if isinstance(named, dict) else named
        classes = found if isinstance(found, list) else [found]
        for one in reversed(classes):
            if one is not None:
                return str(one)
    return None


def _is_of_tiktoken(folder: Path, code: str | None) -> bool:
    """Whether a tokenizer, whose code may be named, is one of Kimi's."""
    kind = code.rpartition(".")[2] if code else _fields_of(folder).get("tokenizer_class")
    return kind == tiktoken_model.CLASS and (folder / tiktoken_model.FILE).is_file()


def _fields_of(folder: Path, name: str = _FIELDS) -> dict[str, Any]:
    """What a JSON file of the folder has; nothing if there is none."""
    # Imported here, because all that imports this package would import the converter.
    from checkpoint_conversion.checkpoint_folder import MAX_CONFIG_BYTES, read_json

    path = folder / name
    return read_json(path, MAX_CONFIG_BYTES) if path.is_file() else {}
