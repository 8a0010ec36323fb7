#!/usr/bin/env python3
"""Measure memory and throughput of the checkpoint conversion, beside cp.

    $ python scripts/benchmarks/conversion.py docs/measurements/conversion --work-folder /scratch
    $ python scripts/benchmarks/conversion.py /tmp/quick --sizes 0.2GB

For every size it makes a synthetic checkpoint with DeepSeek-V3's names and shapes, copies it with
`cp -r` and converts it, in turn and on the same disk; both begin with nothing of the source in the
page cache, and end when the file system has written everything. Bounds:

    memory      2.5 * the largest tensor + 600 MB      resident, of all processes together
    throughput  time of cp / time of the tool >= 0.6   where dtypes are kept, from 4 GB on

Checkpoints are deleted after use; the work folder needs about 2.4 times the largest size. Output:

    70.2 s  hf → absorbed at 5.03 GB: ratio 0.81, peak_mb 1032, own_mb 410, bound_mb 2932

The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit
from benchmarks.kit.command import CommandError, Run, folder_bytes, measure, sync
from benchmarks.synthetic_checkpoint.models import Choice, model_config, stored_tensors
from benchmarks.synthetic_checkpoint.sizes import fit_size, parse_size, stored_bytes, total_bytes
from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.script import Failure

MODEL = "deepseek-v3"
ROOT = Path(__file__).resolve().parents[2]
MAKE = Path(__file__).with_name("make_synthetic_checkpoint.py")
TOOL = (sys.executable, "-m", "checkpoint_conversion")
# Needed disk space over the largest checkpoint: the source, a copy or the target, and a margin.
DISK_FACTOR = 2.4
MEMORY_FACTOR, MEMORY_BASE = 2.5, 600 * 10**6
THROUGHPUT = 0.6
# Smaller checkpoints have no bound: importing torch takes much of their time.
THROUGHPUT_FROM = 4 * 10**9
_PACKAGES = ("torch", "safetensors", "xxhash")


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_disk(folder: Path, choices: list[Choice]) -> None:
    if not folder.is_dir():
        raise ValueError(f"--work-folder {folder} is no folder")
    needed = DISK_FACTOR * max(total_bytes(model_config(choice)) for choice in choices)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"--work-folder {folder} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB needed"
        )


def describe(folder: Path) -> dict:
    """The machine; ``folder`` is on the disk that is measured."""
    return {
        **kit.provenance.source(),
        "processor": kit.provenance.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(folder),
        "versions": kit.provenance.versions(_PACKAGES),
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on."""
    path = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    # The last mount at a place hides the earlier ones.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1]


@dataclass(frozen=True)
class Conversion:
    """A conversion that is measured; the source is a folder's name in the work folder."""

    name: str
    source: str
    options: tuple[str, ...]
    keeps_dtypes: bool = True


FROM_HF = (
    Conversion("hf → absorbed", "hf", ("--to", "absorbed")),
    # Last, because its target is the next one's source.
    Conversion("hf → megatron", "hf", ("--to", "megatron")),
)
TO_HF = Conversion("megatron → hf", "megatron", ("--to", "hf"))
FROM_FP8 = Conversion("hf (FP8) → megatron", "fp8", ("--to", "megatron"), keeps_dtypes=False)


@dataclass(frozen=True)
class Conversions:
    """All conversions of one size of checkpoint, in one work folder."""

    folder: Path
    choice: Choice
    repeat: int

    def rows(self) -> Iterator[Row]:
        """Measure everything; at most two checkpoints are on the disk at a time."""
        self._make("hf")
        # A first copy that is not counted: a virtual machine is given its memory when it first
        # touches it, which takes longer than a copy.
        source, copy = self.folder / "hf", self.folder / "copy"
        self._run(["cp", "-r", str(source), str(copy)], source, copy)
        self._remove("copy")
        for conversion in FROM_HF:
            yield self._measure(conversion)
        self._remove("hf")
        (self.folder / "target").rename(self.folder / "megatron")
        yield self._measure(TO_HF)
        self._remove("megatron")
        self._remove("target")
        self._make("fp8", "--fp8")
        yield self._measure(FROM_FP8)
        self._remove("fp8")
        self._remove("target")

    def _measure(self, conversion: Conversion) -> Row:
        """Copy and convert in turn; the last target stays."""
        source, target, copy = (self.folder / n for n in (conversion.source, "target", "copy"))
        copies, conversions = [], []
        for _ in range(self.repeat):
            self._remove("target")
            copies.append(self._run(["cp", "-r", str(source), str(copy)], source, copy))
            self._remove("copy")
            command = [*TOOL, "convert", str(source), str(target), *conversion.options]
            conversions.append(self._run(command, source, target))
        return Row(
            path=conversion.name,
            model=self._description(),
            source_bytes=folder_bytes(source),
            target_bytes=folder_bytes(target),
            largest_tensor=largest_tensor(self.choice),
            keeps_dtypes=conversion.keeps_dtypes,
            cp_seconds=[run.seconds for run in copies],
            tool_seconds=[run.seconds for run in conversions],
            peak_bytes=max(run.peak_bytes for run in conversions),
            anonymous_bytes=max(run.anonymous_bytes for run in conversions),
        )

    def _run(self, command: list[str], source: Path, target: Path) -> Run:
        return measure(command, source, target, self.folder / "output.log")

    def _description(self) -> str:
        choice = self.choice
        return (
            f"{choice.model}, {choice.layers} layers, the first {choice.dense_layers} dense, "
            f"{choice.experts} experts, vocabulary {model_config(choice)['vocab_size']}, "
            + (f"widths / {choice.scale_down}, " if choice.scale_down > 1 else "real widths, ")
            + f"largest tensor {largest_tensor(choice) / 1e6:.0f} MB"
        )

    def _make(self, name: str, *options: str) -> None:
        choice = self.choice
        sizes = {
            "--layers": choice.layers,
            "--experts": choice.experts,
            "--scale-down": choice.scale_down,
            "--vocab-size": model_config(choice)["vocab_size"],
        }
        command = [sys.executable, str(MAKE)]
        command += [str(self.folder / name), "--model", choice.model, *options]
        command += [str(word) for pair in sizes.items() for word in pair]
        subprocess.run(command, check=True, preexec_fn=ends_with_this_process())

    def _remove(self, name: str) -> None:
        """Remove a folder, and wait until the disk is done with it."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        sync(self.folder)


def largest_tensor(choice: Choice) -> int:
    """Bytes of the largest tensor of the unquantised checkpoint."""
    config = model_config(choice)
    return max(map(stored_bytes, stored_tensors(config)))


@dataclass(frozen=True)
class Row:
    """One conversion at one size."""

    path: str  # what was converted to what
    model: str  # the checkpoint in words
    source_bytes: int  # of all files of the source
    target_bytes: int  # of all files of the target
    largest_tensor: int  # bytes of the largest tensor
    keeps_dtypes: bool  # whether source and target have the same bytes
    cp_seconds: Sequence[float]  # every measured copy of the source
    tool_seconds: Sequence[float]  # every measured conversion, each after its copy
    peak_bytes: int  # most resident memory of any of the conversions
    anonymous_bytes: int  # the most of it that was not mapped files
    error: str = ""  # empty: a conversion that fails ends the benchmark

    @property
    def case(self) -> str:
        """What it is called in reports."""
        return f"{self.path} at {self.source_bytes / 1e9:.2f} GB"

    @property
    def ratio(self) -> float:
        """Throughput relative to copying."""
        return mean(self.cp_seconds) / mean(self.tool_seconds)

    @property
    def memory_bound(self) -> float:
        """Bytes that may be resident."""
        return MEMORY_FACTOR * self.largest_tensor + MEMORY_BASE

    def missed(self) -> list[str]:
        """The bounds that do not hold, in words."""
        problems = []
        if self.peak_bytes > self.memory_bound:
            got, bound = self.peak_bytes / 1e6, self.memory_bound / 1e6
            problems.append(f"{self.case}: {got:.0f} MB resident, at most {bound:.0f} MB")
        if self.judged_by_throughput and self.ratio < THROUGHPUT:
            rate = f"{self.ratio:.2f} of cp's throughput"
            problems.append(f"{self.case}: {rate}, at least {THROUGHPUT}")
        return problems

    @property
    def judged_by_throughput(self) -> bool:
        """Whether the bound on throughput is for this row."""
        return self.keeps_dtypes and self.source_bytes >= THROUGHPUT_FROM


class ConversionReport(kit.Report):
    """One run."""

    row = Row
    environment_key = "machine"

    def as_json(self, row: Row) -> dict:
        """With what follows from it."""
        derived = {"ratio": row.ratio, "memory_bound": row.memory_bound, "missed": row.missed()}
        return asdict(row) | derived

    def figures(self, row: Row) -> dict[str, float]:
        """Seconds, throughput relative to cp, and memory in MB."""
        return {
            "cp_s": mean(row.cp_seconds),
            "tool_s": mean(row.tool_seconds),
            "ratio": row.ratio,
            "peak_mb": row.peak_bytes / 1e6,
            "own_mb": row.anonymous_bytes / 1e6,
            "bound_mb": row.memory_bound / 1e6,
        }

    @classmethod
    def notes(cls, reports: Sequence[ConversionReport]) -> list[str]:
        """The checkpoints, and the bounds that do not hold."""
        rows = [row for report in reports for row in report.rows]
        models = "\n".join(f"- {model}" for model in dict.fromkeys(row.model for row in rows))
        problems = [f"- missed: {problem}" for row in rows for problem in row.missed()]
        return [models, "\n".join(problems) or "Every bound that applies holds."]

    @classmethod
    def panels(cls, reports: Sequence[ConversionReport]) -> list[kit.Panel]:
        """Peak memory beside its bound, and throughput beside that of cp, over the size."""
        rows = [row for report in reports for row in report.rows]
        memory, rates = [], []
        for row in rows:
            size = row.source_bytes / 1e9
            for name, num_bytes in ((row.path, row.peak_bytes), ("bound", row.memory_bound)):
                memory.append(("peak resident memory [GB]", name, size, num_bytes / 1e9))
            rates.append(("throughput relative to cp -r", row.path, size, row.ratio))
        levels = {"bound where dtypes are kept": THROUGHPUT}
        return [
            *kit.collected(memory, "source [GB]", sizes=False),
            *kit.collected(rates, "source [GB]", levels=levels, sizes=False),
        ]


class ConversionBenchmark(kit.Benchmark):
    """All conversions at all sizes."""

    files = "benchmark"
    report = ConversionReport
    options = kit.declare(
        "folder render",
        sizes=kit.Option("sizes of the checkpoints (default: 5GB,20GB)", _sizes, "5GB,20GB"),
        repeat=kit.number("copies and conversions of each kind", 2),
        work_folder=kit.Option("empty space on the disk to measure (default: here)", Path, Path()),
    )
    quick = "--sizes 3MB --repeat 1"

    def prepare(self) -> None:
        """What is converted, and that there is room for it."""
        args, empty = self.args, Choice(model=MODEL, layers=2, experts=2)
        self.choices = [fit_size(empty, size) for size in sorted(args.sizes)]
        _check_disk(args.work_folder, self.choices)
        require_writable(folders={"--work-folder": args.work_folder})
        # The tool is that of this tree, wherever the measurement is started.
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def environment(self) -> dict:
        """The machine."""
        return describe(self.args.work_folder)

    def rows(self) -> Iterator[Row]:
        """All rows.

        Raises:
            Failure: If the tool fails.
        """
        folder = self.args.work_folder
        try:
            with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as work:
                for choice in self.choices:
                    yield from Conversions(Path(work), choice, self.args.repeat).rows()
        except (CommandError, subprocess.CalledProcessError) as error:
            raise Failure(str(error)) from error

    def exit_code(self, report: kit.Report) -> int:
        """1 if a bound is missed; prints which."""
        problems = [problem for row in report.rows for problem in row.missed()]
        for problem in problems:
            print(f"missed: {problem}", file=sys.stderr)
        return 1 if problems else 0


if __name__ == "__main__":
    kit.main(ConversionBenchmark)
