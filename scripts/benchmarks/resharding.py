#!/usr/bin/env python3
r"""Weights of a live model into another layout of the same ranks, beside a transfer of their size.

    $ torchrun --nproc-per-node 2 scripts/benchmarks/resharding.py --json resharding.json

Each rank holds its part of a model of DeepSeek-V3's widths under TP over all ranks, as training
does, and a whole one, as data-parallel rollouts do. Measured are, all ranks beginning together,

    all_gather    of the parts' bytes, by the process group: no way to whole models can be faster
    to whole      WeightResharding(parts, whole).copy(), with the --buckets of its option
    copy          of a part's bytes on each device: no way back can be faster
    to parts      WeightResharding(whole, parts).copy(), which sends nothing

ms are the slowest rank's; gibibytes are those of a rank's target, gigabytes_per_second theirs over
the time; sent is what a rank sends, extra_mib its peak memory beside both models (none on a CPU).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.tables import transfer
from benchmarks.training_step import StepCase, model_config
from console.ranks import world_size

torch: Any = kit.lazy("torch")
_CHUNK = 256 << 20


@dataclass(frozen=True)
class ReshardingCase(kit.Case):
    """What is done to all weights."""

    text = "{0.work} {0.bucket_bytes}"
    work: str  # "all_gather", "to whole", "copy" or "to parts"
    bucket_bytes: int  # option of the plan; of the others what they transfer at a time


class ReshardingReport(kit.Report):
    """One run."""

    row, case = kit.TimedRow, ReshardingCase

    def figures(self, row: kit.TimedRow) -> dict[str, float]:
        """Milliseconds, rate, what was sent, and memory."""
        found = {**transfer(row), "sent_gibibytes": row.more["sent"] / 2**30}
        if row.more["extra"] is not None:
            found["extra_mib"] = row.more["extra"] / 2**20
        return found


class Resharding(kit.Benchmark):
    """Two models on all processes; rank 0 writes."""

    report = ReshardingReport
    strict = True
    options = kit.declare(
        "json render only seconds_per_row=2 seed=1234 moe_layers=4 experts=16 vocab_size=129280 "
        "scale_down=1",
        buckets=kit.sizes("values of bucket_bytes, m is 1024 x 1024", "32m,256m"),
    )
    quick = "--moe-layers 1 --experts 2 --vocab-size 256 --scale-down 32 --buckets 64k"
    recorded = ("moe_layers", "experts", "vocab_size", "scale_down")

    def prepare(self) -> None:
        """Both models; a way there and back is to the bit."""
        if world_size() < 2:
            raise ValueError(
                "resharding needs 2 or more processes, got 1; start this script by "
                "torchrun --nproc-per-node 2"
            )
        from benchmarks.kit.processes import CaseError

        super().prepare()
        self.errors = CaseError
        self._parts, self._whole = self._build(self.processes.size), self._build(1)
        self._bytes = sum(x.nbytes for x in self._parts.parameters())
        plans = [self._plan(to, _CHUNK) for to in ("to whole", "to parts")]
        with torch.no_grad():
            for x in self._parts.parameters():
                x.normal_()
            before = [x.sum(dtype=torch.float64) for x in self._parts.parameters()]
            plans[0]()
            for x in self._parts.parameters():
                x.zero_()
        plans[1]()
        if before != [x.sum(dtype=torch.float64) for x in self._parts.parameters()]:
            raise ArithmeticError("there and back weights have changed")

    def _build(self, tp: int) -> Any:
        from megatron.core.models.gpt import GPTModel

        from absorbed_mla.export import ParallelGroups
        from specs.absorbed_mla_layer_specs import get_absorbed_mla_decoder_block_spec

        # As on a CPU: local layers, also where TransformerEngine is installed.
        device = SimpleNamespace(on_gpu=False, dtype=self.processes.dtype)
        config = model_config(StepCase("ours", "v3", 0, "sbhd", False), self.args, device)
        config.use_cpu_initialization = not self.processes.on_gpu
        config.perform_initialization = False
        config.tensor_model_parallel_size, config.sequence_parallel = tp, tp > 1
        with ParallelGroups(tensor_model_parallel_size=tp):
            spec = get_absorbed_mla_decoder_block_spec(config, backend="local")
            model = GPTModel(
                config, spec, self.args.vocab_size, 4096, position_embedding_type="rope"
            )
        return model.to(self.processes.device)

    def _plan(self, work: str, bucket_bytes: int) -> Callable[[], None]:
        from absorbed_mla.export import WeightResharding

        models = (self._parts, self._whole)[:: 1 if work == "to whole" else -1]
        return WeightResharding(*models, bucket_bytes=bucket_bytes).copy

    def cases(self) -> list[ReshardingCase]:
        """Each plan behind what it cannot be faster than."""
        found = []
        for limit, work in (("all_gather", "to whole"), ("copy", "to parts")):
            found += [ReshardingCase(limit, _CHUNK)]
            found += [ReshardingCase(work, size) for size in self.args.buckets]
        return found

    def measure(self, case: ReshardingCase) -> kit.TimedRow:
        """Once to warm up, once to count, then for ``--seconds-per-row``."""
        from benchmarks.kit.timing import Repeated, repeat_together
        from benchmarks.kit.traffic import count_traffic

        processes = self.processes
        work = processes.together(lambda: self._work(case))
        processes.together(work)

        def observed() -> tuple[int, int | None]:
            before = torch.cuda.memory_allocated() if processes.on_gpu else 0
            if processes.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with count_traffic() as traffic:
                work()
            peak = torch.cuda.max_memory_allocated() - before if processes.on_gpu else None
            return traffic.num_bytes, peak

        sent, extra = processes.together(observed)
        repeated = Repeated(work, on_gpu=processes.on_gpu)
        seconds, _ = repeat_together(repeated, self.args.seconds_per_row, processes)
        target = self._whole if case.work in ("all_gather", "to whole") else self._parts
        more = {"bytes": sum(x.nbytes for x in target.parameters())}
        more |= {"sent": int(processes.maximum([sent])[0]), "extra": processes.largest(extra)}
        return kit.TimedRow(case=case, times=kit.Times.of(seconds), more=more)

    def _work(self, case: ReshardingCase) -> Callable[[], Any]:
        if case.work.startswith("to "):
            return self._plan(case.work, case.bucket_bytes)
        times = -(-self._bytes // case.bucket_bytes)
        size = -(-self._bytes // times)
        ranks = self.processes.size if case.work == "all_gather" else 1
        source = torch.empty(size, dtype=torch.uint8, device=self.processes.device)
        target = source.repeat(ranks)

        def transfer() -> None:
            for _ in range(times):
                if ranks > 1:
                    torch.distributed.all_gather_into_tensor(target, source)
                else:
                    target.copy_(source)

        return transfer


if __name__ == "__main__":
    kit.main(Resharding)
