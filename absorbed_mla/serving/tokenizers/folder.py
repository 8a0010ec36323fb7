"""Loading a tokenizer of ``transformers`` from a folder, with Python code of the folder or not."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)

# In the folder into which transformers copies Python code.
LOCK_FILE = "absorbed_mla.lock"


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """A tokenizer of ``transformers``, from local files only.

    Args:
        folder: With the tokenizer's files.
        trust_remote_code: Whether Python modules of the folder may run in this process: those that
            ``auto_map`` names, and what they import. Processes that share transformers' cache, such
            as torchrun's ranks, then load one after the other.

    Raises:
        ValueError: If there is none, it cannot be loaded, or it has code that may not run; nobody
            is asked.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError("a tokenizer needs transformers: pip install transformers") from error
    code = code_of(folder)
    if code and not trust_remote_code:
        raise ValueError(
            f"the tokenizer in {folder} is Python code ({code}), which runs with "
            "trust_remote_code=True (--trust-remote-code) only, got False"
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
    # Imported here, because all that imports this package would import the converter.
    from checkpoint_conversion.checkpoint_folder import CONFIG, MAX_CONFIG_BYTES, read_json

    for name in ("tokenizer_config.json", CONFIG):
        path = folder / name
        if not path.is_file():
            continue
        named = read_json(path, MAX_CONFIG_BYTES).get("auto_map")
        found = named.get("AutoTokenizer") if isinstance(named, dict) else named
        classes = found if isinstance(found, list) else [found]
        for one in reversed(classes):
            if one is not None:
                return str(one)
    return None
