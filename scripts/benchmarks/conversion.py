#!/usr/bin/env python3
"""Measure memory and throughput of the checkpoint conversion, beside cp.

    $ python scripts/benchmarks/conversion.py docs/conversion --work-folder /scratch
    $ python scripts/benchmarks/conversion.py /tmp/quick --sizes 0.2GB

For every size it makes a synthetic checkpoint with DeepSeek-V3's names and shapes, and then in turn
copies it with `cp -r` and converts it, on the same disk; both begin with nothing of the source in
the page cache, and end when the file system has written everything. Bounds:

    memory      2.5 * the largest tensor + 600 MB      resident, of all processes together
    throughput  time of cp / time of the tool >= 0.6   where dtypes are kept, from 4 GB on

What it wrote is deleted as it goes; the work folder needs about 2.4 times the largest size. Output:

    hf → absorbed at 5.03 GB: ratio 0.81, peak_mb 1032, own_mb 410, bound_mb 2932

The exit code is 1 if a bound is missed; the last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import count
from benchmarks.kit.command import CommandError, Run, folder_bytes, measure, sync
from benchmarks.kit.plot import Panel
from benchmarks.kit.report import Report, Results
from benchmarks.synthetic_checkpoint.models import Choice, model_config, stored_tensors
from benchmarks.synthetic_checkpoint.sizes import fit_size, parse_size, stored_bytes, total_bytes
from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import Failure, leave, run_script

NAME = "benchmark"
ROOT = Path(__file__).resolve().parents[2]
MAKE = Path(__file__).with_name("make_synthetic_checkpoint.py")
TOOL = (sys.executable, "-m", "checkpoint_conversion")
# Of the largest size: a source, a copy or target of it, and what ranks hold twice.
DISK_FACTOR = 2.4
MEMORY_FACTOR, MEMORY_BASE = 2.5, 600 * 10**6
THROUGHPUT = 0.6
# Below, the start of Python and torch takes a good part of the time.
THROUGHPUT_FROM = 4 * 10**9
_PACKAGES = ("torch", "safetensors", "xxhash")

# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("conversion.py", __doc__)
    add = parser.add_argument
    arguments.add_folder(parser, "benchmark.json and .png")
    add(
        "--sizes",
        type=_sizes,
        default=_sizes("5GB,20GB"),
        help="of the checkpoints (default: 5GB,20GB)",
    )
    add("--repeat", type=count, default=2, help="copies and conversions of each kind")
    add("--work-folder", type=Path, default=Path(), help="on the disk to measure (default: here)")
    add(
        "--model",
        choices=("deepseek-v3", "deepseek-v2-lite"),
        default="deepseek-v3",
        help="whose shapes",
    )
    add("--vocab-size", type=count, help="rows of the embedding (default: the model's own)")
    args = parser.parse_args(argv)
    arguments.check_files(None, args.render)
    return args


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sizes, write the report, compare with the bounds; returns the exit code."""
    return run_script("conversion.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.render:
        require_writable(folders={"folder": args.folder})
        results(ConversionReport.show_again(args.render)).publish(args.folder, NAME)
        return 0
    report = measure_all(args)
    results([report]).publish(args.folder, NAME)
    problems = [problem for row in report.rows for problem in row.missed()]
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def measure_all(args: argparse.Namespace) -> ConversionReport:
    """Measure every size, and write the results.

    Raises:
        ValueError: If the disk is too small or a folder cannot be written.
        Failure: If the tool fails.
    """
    empty = Choice(model=args.model, layers=2, experts=2, vocab_size=args.vocab_size)
    choices = [fit_size(empty, size) for size in sorted(args.sizes)]
    _check_disk(args.work_folder, choices)
    require_writable(folders={"folder": args.folder, "--work-folder": args.work_folder})
    # The tool is that of this tree, wherever the measurement is started.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    report = ConversionReport(describe(args.work_folder))
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.work_folder) as work:
        try:
            for choice in choices:
                for row in Bench(Path(work), choice, args.repeat).rows():
                    report.rows.append(row)
                    report.write(args.folder / f"{NAME}.json")
                    print(report.line(row), flush=True)
        except (CommandError, subprocess.CalledProcessError) as error:
            raise Failure(str(error)) from error
    return report


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
        **provenance.source(),
        "processor": provenance.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "filesystem": filesystem(folder),
        "versions": provenance.versions(_PACKAGES),
    }


def filesystem(folder: Path) -> str:
    """Type of the file system that ``folder`` is on."""
    path = folder.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    around = [(point, kind) for point, kind in mounts if path.is_relative_to(point)]
    # Of mounts at one place, the last is the one to be seen.
    return max(reversed(around), key=lambda mount: len(mount[0]))[1]


# ---- measuring


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
class Bench:
    """One size of checkpoint in one work folder."""

    folder: Path
    choice: Choice
    repeat: int

    def rows(self) -> Iterator[Row]:
        """Measure everything; at most two checkpoints are there at a time."""
        self._make("hf")
        # A virtual machine gets its memory when it is first touched, which takes longer than a
        # copy: a first copy that is not counted.
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
        """Copy and convert in turn; leaves the last target."""
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
    return max(stored_bytes(tensor, config) for tensor in stored_tensors(config))


# ---- report


@dataclass(frozen=True)
class Row:
    """One conversion at one size.

    Attributes:
        path: What was converted to what.
        model: The checkpoint in words.
        source_bytes: Of all files of the source.
        target_bytes: Of all files of the target.
        largest_tensor: Bytes of the largest tensor.
        keeps_dtypes: Whether source and target have the same bytes.
        cp_seconds: Every measured copy of the source.
        tool_seconds: Every measured conversion, each after its copy.
        peak_bytes: Most resident memory of any of the conversions.
        anonymous_bytes: The most of it that was not mapped files.
        error: Empty: a conversion that fails ends the benchmark.
    """

    path: str
    model: str
    source_bytes: int
    target_bytes: int
    largest_tensor: int
    keeps_dtypes: bool
    cp_seconds: Sequence[float]
    tool_seconds: Sequence[float]
    peak_bytes: int
    anonymous_bytes: int
    error: str = ""

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


class ConversionReport(Report):
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


def results(reports: Sequence[ConversionReport]) -> Results:
    """Everything that is shown."""
    rows = [row for report in reports for row in report.rows]
    models = "\n".join(f"- {model}" for model in dict.fromkeys(row.model for row in rows))
    problems = [problem for row in rows for problem in row.missed()]
    verdict = "\n".join(f"- missed: {p}" for p in problems) or "Every bound that applies holds."
    return Results(reports, panels(rows), [models, verdict, growth(rows)])


def growth(rows: Sequence[Row]) -> str:
    """How memory and time grow from the smallest size to the largest; empty for one size."""
    lines = []
    for path, group in _by_path(rows).items():
        first, last = group[0], group[-1]
        if first is not last:
            size = last.source_bytes / first.source_bytes
            memory = last.peak_bytes / first.peak_bytes
            duration = mean(last.tool_seconds) / mean(first.tool_seconds)
            lines.append(
                f"- {path}: {size:.1f} x the size, {memory:.2f} x the peak memory, "
                f"{duration:.1f} x the time"
            )
    return "\n".join(["Growth from the smallest size to the largest:", "", *lines]) if lines else ""


def _by_path(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.source_bytes):
        groups[row.path].append(row)
    return groups


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Peak memory beside its bound, and throughput beside that of cp, over the size."""
    by_path = _by_path(rows).items()
    memory = {n: [(r.source_bytes / 1e9, r.peak_bytes / 1e9) for r in g] for n, g in by_path}
    memory["bound"] = [(row.source_bytes / 1e9, row.memory_bound / 1e9) for row in rows]
    rates = {name: [(r.source_bytes / 1e9, r.ratio) for r in group] for name, group in by_path}
    levels = {"bound where dtypes are kept": THROUGHPUT}
    return [
        Panel("peak resident memory [GB]", "source [GB]", memory, sizes=False),
        Panel("throughput relative to cp -r", "source [GB]", rates, levels, sizes=False),
    ]


if __name__ == "__main__":
    leave(main())
