#!/usr/bin/env python3
r"""New weights for a loaded ``LLM`` from a live model on the same GPU, beside a copy of its size.

    $ python scripts/benchmarks/weight_updates.py --json weights.json
    $ python scripts/benchmarks/weight_updates.py --dense-layers 8 --moe-layers 0 --json dense.json

The model has DeepSeek-V3's widths and random weights. This program holds it as a trainer does; an
``LLM`` of the same checkpoint in a process of its own has it, and another one in this process, as a
rank of torchrun would. Measured are

    copy          a copy of as many bytes on the device, by PyTorch: no transfer can be faster
    update        LLM.update_weights(LiveWeights(model)): over CUDA IPC, in buckets
    update here   the same of the LLM in this process
    sleep 1       LLM.sleep(1): weights go to the host, the cache is freed; then wake()
    sleep 2       LLM.sleep(2): both are freed; then update_weights and wake()

gibibytes are those of the weights, gigabytes_per_second theirs over the time; freed is the device's
memory that sleep gives back over that of the weights and the cache. On a CPU bytes are not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.arguments import use_device
from benchmarks.kit.tables import transfer
from benchmarks.served.model import (
    MODEL_OPTIONS,
    TINY_MODEL,
    choice_of,
    token_bytes,
    write_model,
)

torch: Any = kit.lazy("torch")
WORKS = ("copy", "update", "update here", "sleep 1", "sleep 2")
_CACHE_TOKENS = 65_536


@dataclass(frozen=True)
class UpdateCase(kit.Case):
    """What is done to all weights."""

    text = "{0.work}"
    work: str  # one of WORKS


class UpdateReport(kit.Report):
    """One run."""

    row, case = kit.TimedRow, UpdateCase

    def figures(self, row: kit.TimedRow) -> dict[str, float]:
        """Milliseconds, rate, and the share of the memory that is free meanwhile."""
        found = transfer(row)
        if "freed" in row.more:
            found["freed"] = row.more["freed"] / row.more["held"]
        return found


class WeightUpdates(kit.Benchmark):
    """A model in this program and in two ``LLM``."""

    report = UpdateReport
    strict = True
    options = kit.declare(
        f"json render only device time_limit=300 seed=1234 repeats=5 {MODEL_OPTIONS}"
    )
    quick = f"{TINY_MODEL} --repeats 1"
    recorded = ("dense_layers", "moe_layers", "experts", "repeats")

    def prepare(self) -> None:
        """Both models."""
        args, self._folder = self.args, tempfile.TemporaryDirectory()
        use_device(args.device)
        folder = Path(self._folder.name) / "model"
        # Before anything is computed on the GPU: it forks.
        config = write_model(folder, choice_of(args))
        super().prepare()

        from absorbed_mla import LLM
        from absorbed_mla.export import LiveWeights
        from absorbed_mla.serving.llm_options import LLMOptions
        from absorbed_mla.serving.weights.checkpoint import open_model
        from absorbed_mla.serving.weights.load import load_model

        options = {"device": self.processes.device.type, "max_num_seqs": 4}
        options |= {"cache_tokens": _CACHE_TOKENS, "max_model_len": 1024}
        # With it this process would be the model's.
        rank = os.environ.pop("LOCAL_RANK")
        self._llm = LLM(folder, tokenizer="bytes", **options)
        os.environ["LOCAL_RANK"] = rank
        self._llm_here = LLM(folder, tokenizer="bytes", **options)
        given = LLMOptions.of({**options, "tensor_parallel_size": 1})
        model = load_model(open_model(folder), given, self.processes.device)
        self._weights = LiveWeights(model)
        self._bytes = sum(
            torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in self._weights.shapes
        )
        self._held = self._bytes + _CACHE_TOKENS * token_bytes(config)

    def cases(self) -> list[UpdateCase]:
        """All of ``WORKS``."""
        return [UpdateCase(work) for work in WORKS]

    def measure(self, case: UpdateCase) -> kit.TimedRow:
        """Once to warm up, then ``--repeats`` times."""
        work, more = self._works()[case.work], {"bytes": self._bytes}
        work()
        seconds, freed = [], []
        for _ in range(self.args.repeats):
            self.processes.synchronize()
            begin = time.perf_counter()
            freed.append(work())
            self.processes.synchronize()
            seconds.append(time.perf_counter() - begin)
        if freed[0] is not None:
            more |= {"freed": min(freed), "held": self._held}
        return kit.TimedRow(case=case, times=kit.Times.of(seconds), more=more)

    def rows(self):
        """Of all cases; the engine ends with the last one."""
        with self._folder, self._llm, self._llm_here:
            yield from super().rows()

    def _works(self) -> dict[str, Callable[[], int | None]]:
        def copy() -> None:
            size = min(self._bytes, 256 << 20)
            source = torch.empty(size, dtype=torch.uint8, device=self.processes.device)
            target = torch.empty_like(source)
            for _ in range(-(-self._bytes // size)):
                target.copy_(source)

        def update(llm: Any = self._llm) -> None:
            llm.update_weights(self._weights)

        def sleep(level: int) -> int | None:
            before = self._free()
            self._llm.sleep(level)
            freed = self._free() - before
            if level == 2:
                update()
            self._llm.wake()
            return freed if self.processes.on_gpu else None

        return {
            "copy": copy,
            "update": update,
            "update here": lambda: update(self._llm_here),
            "sleep 1": lambda: sleep(1),
            "sleep 2": lambda: sleep(2),
        }

    def _free(self) -> int:
        """Bytes of the device that no process has."""
        return torch.cuda.mem_get_info()[0] if self.processes.on_gpu else 0


if __name__ == "__main__":
    kit.main(WeightUpdates)
