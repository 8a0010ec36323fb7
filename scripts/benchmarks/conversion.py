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
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kit, synthetic
from benchmarks.kit.command import CommandError, Run, folder_bytes, measure, sync
from benchmarks.synthetic import Choice
from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.script import Failure

SCRIPTS = Path(__file__).resolve().parents[1]
TOOL = (sys.executable, "-m", "checkpoint_conversion")
# In a process of its own, whose memory is not this one's.
MAKE = (
    "import json, pathlib, sys; sys.path.insert(0, sys.argv[1]); "
    "from benchmarks.synthetic import Choice, write; "
    "write(pathlib.Path(sys.argv[2]), Choice(**json.loads(sys.argv[3])))"
)
# Needed disk space over the largest checkpoint: the source, a copy or the target, and a margin.
DISK_FACTOR = 2.4
MEMORY_FACTOR, MEMORY_BASE = 2.5, 600 * 10**6
THROUGHPUT = 0.6
# Smaller checkpoints have no bound: importing torch takes much of their time.
THROUGHPUT_FROM = 4 * 10**9
# Name, source, format of the target, and whether dtypes are kept; a target is the next one's
# source.
FP8 = "hf (FP8) → megatron"
CONVERSIONS = (
    ("hf → absorbed", "hf", "absorbed"),
    ("hf → megatron", "hf", "megatron"),
    ("megatron → hf", "megatron", "hf"),
    (FP8, "fp8", "megatron"),
)


def _sizes(text: str) -> list[int]:
    try:
        return [synthetic.parse_size(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def describe(folder: Path) -> dict:
    """The machine; ``folder`` is on the disk that is measured."""
    return {
        **kit.provenance.source(),
        "processor": kit.provenance.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(folder),
        "versions": kit.provenance.versions(("torch", "safetensors", "xxhash")),
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on."""
    path = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    # The last mount at a place hides the earlier ones.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1]


@dataclass(frozen=True)
class Row:
    """One conversion at one size."""

    path: str  # what was converted to what
    model: str  # the checkpoint in words
    source_bytes: int  # of all files of the source
    target_bytes: int  # of all files of the target
    largest_tensor: int  # bytes of the largest tensor of the unquantised checkpoint
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
        judged = self.keeps_dtypes and self.source_bytes >= THROUGHPUT_FROM
        if judged and self.ratio < THROUGHPUT:
            rate = f"{self.ratio:.2f} of cp's throughput"
            problems.append(f"{self.case}: {rate}, at least {THROUGHPUT}")
        return problems


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
        """Peak memory and throughput, with their bounds, over the size."""
        points = []
        for row in (row for report in reports for row in report.rows):
            size, memory = row.source_bytes / 1e9, "peak memory [MB]"
            points.append((memory, row.path, size, row.peak_bytes / 1e6))
            points.append((memory, "bound", size, row.memory_bound / 1e6))
            points.append(("throughput relative to cp -r", row.path, size, row.ratio))
        return kit.collected(points, "source [GB]", sizes=False)


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
        folder = self.args.work_folder
        if not folder.is_dir():
            raise ValueError(f"--work-folder {folder} is no folder")
        self.choices = [synthetic.fit_size(size) for size in sorted(self.args.sizes)]
        needed = DISK_FACTOR * max(map(synthetic.total_bytes, self.choices))
        synthetic.require_room("--work-folder", folder, needed)
        require_writable(folders={"--work-folder": folder})
        # The tool is that of this tree, wherever the measurement is started.
        paths = [str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def environment(self) -> dict:
        """The machine."""
        return describe(self.args.work_folder)

    def rows(self) -> Iterator[Row]:
        """All rows.

        Raises:
            Failure: If the tool fails.
        """
        try:
            for choice in self.choices:
                with tempfile.TemporaryDirectory(dir=self.args.work_folder) as work:
                    yield from self._of_size(choice, Path(work))
        except (CommandError, subprocess.CalledProcessError) as error:
            raise Failure(str(error)) from error

    def _of_size(self, choice: Choice, work: Path) -> Iterator[Row]:
        """All conversions; at most two checkpoints are on the disk at a time."""
        target, last = work / "target", ""
        for name, source, kind in CONVERSIONS:
            if source != last:
                if last:
                    _remove(work / last)
                if source == "megatron":
                    target.rename(work / source)
                else:
                    _remove(target)
                    self._make(replace(choice, fp8=source == "fp8"), work / source)
                last = source
            yield self._measure(name, choice, work / source, target, kind)

    def _make(self, choice: Choice, folder: Path) -> None:
        words = [str(SCRIPTS), str(folder), json.dumps(asdict(choice))]
        command = [sys.executable, "-c", MAKE, *words]
        subprocess.run(command, check=True, preexec_fn=ends_with_this_process())
        # A copy that is not counted: a virtual machine is given its memory when it first touches
        # it, which takes longer than a copy.
        self._copy(folder)

    def _copy(self, folder: Path) -> Run:
        copy = folder.with_name("copy")
        run = measure(["cp", "-r", str(folder), str(copy)], folder, copy, folder.parent / "log")
        _remove(copy)
        return run

    def _measure(self, name: str, choice: Choice, source: Path, target: Path, kind: str) -> Row:
        """Copy and convert in turn; the last target stays."""
        copies, conversions = [], []
        for _ in range(self.args.repeat):
            _remove(target)
            copies.append(self._copy(source))
            command = [*TOOL, "convert", str(source), str(target), "--to", kind]
            conversions.append(measure(command, source, target, source.parent / "log"))
        largest = largest_tensor(choice)
        widths = f"widths / {choice.scale_down}" if choice.scale_down > 1 else "real widths"
        return Row(
            path=name,
            model=f"deepseek-v3, {choice.layers} layers, the first {choice.dense_layers} dense, "
            f"{choice.experts} experts, {widths}, largest tensor {largest / 1e6:.0f} MB",
            source_bytes=folder_bytes(source),
            target_bytes=folder_bytes(target),
            largest_tensor=largest,
            keeps_dtypes=name != FP8,
            cp_seconds=[run.seconds for run in copies],
            tool_seconds=[run.seconds for run in conversions],
            peak_bytes=max(run.peak_bytes for run in conversions),
            anonymous_bytes=max(run.anonymous_bytes for run in conversions),
        )

    def exit_code(self, report: kit.Report) -> int:
        """1 if a bound is missed; prints which."""
        problems = [problem for row in report.rows for problem in row.missed()]
        for problem in problems:
            print(f"missed: {problem}", file=sys.stderr)
        return 1 if problems else 0


def _remove(folder: Path) -> None:
    """Remove a folder, and wait until the disk is done with it."""
    shutil.rmtree(folder, ignore_errors=True)
    sync(folder.parent)


def largest_tensor(choice: Choice) -> int:
    """Bytes of the largest tensor of the unquantised checkpoint."""
    config = synthetic.model_config(choice)
    return max(tensor.num_bytes for tensor in synthetic.stored_tensors(config))


if __name__ == "__main__":
    kit.main(ConversionBenchmark)
