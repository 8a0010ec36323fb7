"""A checkpoint in memory and a writer of raw bytes, for tests of what stands between formats."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from checkpoint_conversion.formats.base import (
    Checkpoint,
    Entry,
    Part,
    PartResult,
    TargetOptions,
    Writer,
)
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.manifest import tensor_record
from checkpoint_conversion.model import ModelConfig
from tests.conversion.support import in_memory


class MemoryCheckpoint(Checkpoint):
    """Hugging Face's names, values in memory."""

    format = "memory"

    def __init__(self, path: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.path, self.config = path, config
        self.layout = {"kept": "in memory"}
        self.stored = in_memory(tensors)
        self.left_alone, self.auxiliary, self.notes = {}, {}, []

    def hugging_face_tensors(self, dtype=None) -> dict[str, LazyTensor]:
        return dict(self.stored)


class RawWriter(Writer):
    """A file of raw bytes per part of three tensors.

    Attributes:
        before: Called before each part is written, with its name.
        written: Names of the parts that were written.
    """

    format = "raw"

    def __init__(self, config: ModelConfig, options: TargetOptions) -> None:
        self.config, self.options = config, options
        self.before: Callable[[str], None] = lambda name: None
        self.written: list[str] = []
        self._lock = threading.Lock()

    def plan(self, tensors: Mapping[str, LazyTensor], part_bytes: int) -> list[Part]:
        entries = [Entry(name, tensor) for name, tensor in tensors.items()]
        groups = [entries[i : i + 3] for i in range(0, len(entries), 3)]
        return [
            Part(f"part-{i:03d}", tuple(group), sum(entry.tensor.peak for entry in group))
            for i, group in enumerate(groups)
        ]

    def layout(self) -> dict[str, object]:
        return {"kept": "raw"}

    def write_part(self, folder, part, session, progress) -> PartResult:
        self.before(part.name)
        records, name = [], f"weights/{part.name}.bin"
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            for entry in part.entries:
                values = entry.tensor.load(session)
                file.write(values.float().numpy().tobytes())
                progress(entry.tensor.nbytes)
                records.append(tensor_record(entry.key, values, name))
        with self._lock:
            self.written.append(part.name)
        return PartResult(part.name, {name: path.stat().st_size}, records)

    def finish(self, folder, results, auxiliary) -> None:
        (folder / "index.json").write_text(json.dumps([result.name for result in results]))
