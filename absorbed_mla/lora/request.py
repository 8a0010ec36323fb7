"""``LoRARequest``: which adapter a request of ``LLM`` is generated with."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class LoRARequest:
    """An adapter in PEFT's format, by vLLM's names.

    Args:
        lora_name: Of the adapter, for people.
        lora_int_id: A number above 0, as vLLM wants one; what an adapter is, its files say.
        lora_path: Folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        ValueError: Naming the field, what it got and what it accepts.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path

    def __post_init__(self) -> None:
        if not self.lora_name or not isinstance(self.lora_name, str):
            raise ValueError(f"lora_name must be a text that is not empty, got {self.lora_name!r}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"lora_int_id must be an integer above 0, got {number!r}")
        missing = [n for n in (CONFIG, WEIGHTS) if not (Path(self.lora_path) / n).is_file()]
        if missing:
            raise ValueError(f"lora_path: {self.lora_path} has no {missing[0]}")

    def digest(self) -> str:
        """Of the contents of both files: requests share cached blocks if it is the same.

        Raises:
            OSError: If a file is not there any more.
        """
        files = [Path(self.lora_path).absolute() / name for name in (CONFIG, WEIGHTS)]
        stats = [file.stat() for file in files]
        return _digest(*files, *((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats))


@functools.lru_cache(maxsize=256)
def _digest(config: Path, weights: Path, *_: tuple[int, int, int]) -> str:
    """Read once for files that stay as they are: every output of every request asks."""
    found = hashlib.sha256()
    for path in (config, weights):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
