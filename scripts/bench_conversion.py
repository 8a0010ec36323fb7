#!/usr/bin/env python3
"""Measure memory and throughput of the checkpoint conversion, beside cp.

    $ python scripts/bench_conversion.py docs/conversion --work-folder /scratch
    $ python scripts/bench_conversion.py /tmp/quick --sizes 0.2GB

For every size it makes a synthetic checkpoint with DeepSeek-V3's names and shapes, and then in turn
copies it with `cp -r` and converts it, on the same disk. What it wrote is deleted as it goes; the
work folder needs about 2.4 times the largest size. The exit code is 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from console.outputs import require_writable
from console.parent import ends_with_this_process
from console.parser import Parser
from console.script import Failure, leave, run_script
from conversion_benchmark.machine import describe
from conversion_benchmark.measure import CommandError, Run, folder_bytes, measure, sync
from conversion_benchmark.report import Row, table, write_report
from synthetic_checkpoint.models import Choice, model_config, stored_tensors
from synthetic_checkpoint.sizes import fit_size, parse_size, stored_bytes, total_bytes

ROOT = Path(__file__).resolve().parents[1]
TOOL = (sys.executable, "-m", "checkpoint_conversion")
# Of the largest size: a source, a copy or target of it, and what ranks hold twice.
DISK_FACTOR = 2.4


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
        # copy: that falls to one that is not counted.
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
        row = Row(
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
        print(table([row]).splitlines()[-1], flush=True)
        return row

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
        command = [sys.executable, str(ROOT / "scripts" / "make_synthetic_checkpoint.py")]
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


def main(argv: list[str] | None = None) -> int:
    """Measure all sizes, write the report, compare with the bounds; returns the exit code."""
    return run_script("bench_conversion.py", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    empty = Choice(model=arguments.model, layers=2, experts=2, vocab_size=arguments.vocab_size)
    choices = [fit_size(empty, size) for size in sorted(arguments.sizes)]
    _check_disk(arguments.work_folder, choices)
    require_writable(folders={"folder": arguments.folder, "--work-folder": arguments.work_folder})
    # The tool is that of this tree, wherever the measurement is started.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.work_folder) as work:
        try:
            for choice in choices:
                rows += Bench(Path(work), choice, arguments.repeat).rows()
        except (CommandError, subprocess.CalledProcessError) as error:
            raise Failure(str(error)) from error
    write_report(arguments.folder, rows, describe(arguments.work_folder))
    print(f"\n{table(rows)}\n\nWritten to {arguments.folder}")
    problems = [problem for row in rows for problem in row.missed()]
    for problem in problems:
        print(f"missed: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench_conversion.py", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help="where benchmark.json, .md and .png go")
    add(
        "--sizes",
        type=_sizes,
        default=_sizes("5GB,20GB"),
        help="of the checkpoints (default: 5GB,20GB)",
    )
    add("--repeat", type=_count, default=2, help="copies and conversions of each kind")
    add("--work-folder", type=Path, default=Path(), help="on the disk to measure (default: here)")
    add(
        "--model",
        choices=("deepseek-v3", "deepseek-v2-lite"),
        default="deepseek-v3",
        help="whose shapes",
    )
    add("--vocab-size", type=_count, help="rows of the embedding (default: the model's own)")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(size) for size in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def _check_disk(folder: Path, choices: list[Choice]) -> None:
    if not folder.is_dir():
        raise ValueError(f"--work-folder {folder} is no folder")
    needed = DISK_FACTOR * max(total_bytes(model_config(choice)) for choice in choices)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"--work-folder {folder} has {free / 1e9:.1f} GB free; {needed / 1e9:.1f} GB needed"
        )


if __name__ == "__main__":
    leave(main())
