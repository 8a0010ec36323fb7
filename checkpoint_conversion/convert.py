"""Converting a checkpoint: the plan, then part by part into a folder that gets its name last."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

from checkpoint_conversion import __version__
from checkpoint_conversion.formats import open_checkpoint, recognise
from checkpoint_conversion.formats.base import Part, TargetOptions
from checkpoint_conversion.journal import Journal, source_files
from checkpoint_conversion.lazy_tensor import ReadSession
from checkpoint_conversion.manifest import (
    Manifest,
    tensor_records,
    weights_folder,
    write_manifest,
)
from checkpoint_conversion.part_runner import MemoryBudget, run_parts
from checkpoint_conversion.planning import ConversionPlan, plan_conversion
from checkpoint_conversion.progress import Reporter, format_bytes
from checkpoint_conversion.report import ConversionReport, peak_rss, worst_errors
from checkpoint_conversion.target_folder import (
    TargetFolder,
    check_places,
    refuse_existing,
)

# More threads gain nothing on one disk, and each needs memory.
_MOST_WORKERS = 4


def convert(
    source: Path,
    target: Path,
    to: str,
    options: TargetOptions | None = None,
    *,
    force: bool = False,
    resume: bool = False,
    exclude_mtp: bool = False,
    workers: int | None = None,
    hf_config: Path | None = None,
    follow_links: bool = False,
    dry_run: bool = False,
    reporter: Reporter | None = None,
) -> ConversionReport:
    """Convert a checkpoint.

    Whatever interrupts it, ``target`` is absent (or the old one) or complete, and what is finished
    stays beside it for ``resume``.

    Args:
        source: The checkpoint's folder; nothing is written there.
        target: Folder to make.
        to: Format of the target, one of ``formats.FORMATS``.
        options: How to write it.
        force: Replace a target that is a checkpoint or empty, after success.
        resume: Continue an interrupted conversion, if there is one.
        exclude_mtp: Leave out the multi-token-prediction layers.
        workers: Threads that read and write; None: one per core, up to 4.
        hf_config: A config.json for a Megatron checkpoint, instead of what it holds.
        follow_links: Whether links may lead out of the source.
        dry_run: Only plan, from the headers; write nothing.
        reporter: Hears of the progress.

    Raises:
        CheckpointError: If the source cannot be read or converted, or the target may not be
            written; everything that headers tell is known before the first byte is written.
        OSError: If the file system fails, for instance because the disk is full.
    """
    started = time.monotonic()
    options, reporter = options or TargetOptions(), reporter or Reporter()
    check_places(source, target)
    if not resume:
        refuse_existing(target, force, _weights_of)
    checkpoint = open_checkpoint(source, hf_config, follow_links)
    plan = plan_conversion(checkpoint, to, options, exclude_mtp)
    if dry_run:
        return ConversionReport(plan=plan, target=target, dry_run=True)
    fingerprint = _fingerprint(plan, options, hf_config)
    with TargetFolder(target, force, _weights_of) as folder:
        conversion = _Conversion(plan, folder, reporter)
        conversion.run(fingerprint, resume, workers or min(_MOST_WORKERS, os.cpu_count() or 1))
    return ConversionReport(
        plan=plan,
        target=target,
        resumed_parts=conversion.resumed_parts,
        fp8_errors=conversion.fp8_errors,
        seconds=time.monotonic() - started,
        bytes_written=conversion.bytes_written,
        peak_rss=peak_rss(),
    )


class _Conversion:
    """One conversion, from an empty or unfinished folder to the target."""

    def __init__(self, plan: ConversionPlan, folder: TargetFolder, reporter: Reporter) -> None:
        self._plan, self._folder, self._reporter = plan, folder, reporter
        self._budget = MemoryBudget(plan.memory)
        self.resumed_parts = self.bytes_written = 0
        self.fp8_errors: dict | None = None

    def run(self, fingerprint: dict, resume: bool, workers: int) -> None:
        """Do all of it."""
        journal = self._open_journal(fingerprint, resume)
        self.resumed_parts = len(journal.results)
        try:
            if not self._folder.is_published():
                self._write_parts(journal, workers)
                self._finish(journal)
                self._folder.publish()
            self._folder.remove_replaced()
            self.fp8_errors = worst_errors(tensor_records(journal.results.values()))
        except (Exception, KeyboardInterrupt) as error:
            if self._folder.contents.exists():
                error.add_note("What is finished is kept; --resume continues after it.")
            raise
        finally:
            journal.close()
            self._reporter.finish()

    def _open_journal(self, fingerprint: dict, resume: bool) -> Journal:
        folder = self._folder
        journal = Journal.resume(folder.journal, fingerprint) if resume else None
        if journal is not None and folder.is_published():
            return journal
        folder.refuse_existing()
        if journal is None or not folder.contents.exists():
            if folder.start():
                self._reporter.say("removed what an interrupted conversion had left")
            elif resume:
                self._reporter.say("there is nothing to resume; starting anew")
            return Journal.create(folder.journal, fingerprint)
        for name in journal.drop_damaged(folder.contents):
            self._reporter.say(f"{name} is not as it was recorded, and is written again")
        folder.keep_only({file for part in journal.results.values() for file in part.files})
        return journal

    def _write_parts(self, journal: Journal, workers: int) -> None:
        parts = [part for part in self._plan.parts if part.name not in journal.results]
        left = sum(part.nbytes for part in parts)
        self._check_space(left)
        self._reporter.start(self._plan.nbytes, self._plan.nbytes - left)

        def progress(nbytes: int) -> None:
            self._budget.check()
            self._reporter.advance(nbytes)

        def write(part: Part) -> None:
            with ReadSession() as session:
                result = self._plan.writer.write_part(
                    self._folder.contents, part, session, progress
                )
            self._folder.sync_folders_of(result.files)
            journal.add(result)

        run_parts(parts, write, self._budget, workers)
        self.bytes_written = left

    def _check_space(self, left: int) -> None:
        auxiliary = sum(file.stat().st_size for file in self._plan.checkpoint.auxiliary.values())
        free = shutil.disk_usage(self._folder.contents).free
        if free < left + auxiliary:
            raise OSError(
                errno.ENOSPC,
                f"the target needs {format_bytes(left + auxiliary)}, but the disk has only "
                f"{format_bytes(free)} left",
                str(self._folder.path.parent),
            )

    def _finish(self, journal: Journal) -> None:
        """Everything beside the parts, the manifest last."""
        plan, contents = self._plan, self._folder.contents
        results = [journal.results[part.name] for part in plan.parts]
        plan.writer.finish(contents, results, plan.checkpoint.auxiliary)
        records = tensor_records(results)
        source = plan.checkpoint
        manifest = Manifest(
            tool_version=__version__,
            source={
                "format": source.format,
                "layout": source.layout,
                "folder": source.path.resolve().name,
            },
            target={
                "format": plan.writer.format,
                "layout": plan.writer.layout(),
                "options": _as_json(plan.writer.options),
            },
            left_out=plan.left_out,
            tensors=records,
            fp8_errors=worst_errors(records),
        )
        write_manifest(manifest, contents)


def _fingerprint(plan: ConversionPlan, options: TargetOptions, hf_config: Path | None) -> dict:
    """What the result depends on."""
    source = plan.checkpoint.path
    given = hf_config.read_bytes() if hf_config is not None else b""
    return {
        "tool version": __version__,
        "source": str(source.resolve()),
        "source file": source_files(weights_folder(source)),
        "--hf-config": hashlib.sha256(given).hexdigest(),
        "format": plan.writer.format,
        "option": _as_json(options),
        "part": {part.name: _digest(part) for part in plan.parts},
    }


def _as_json(options: TargetOptions) -> dict:
    return {
        name: str(value).removeprefix("torch.") if name == "dtype" and value else value
        for name, value in asdict(options).items()
    }


def _digest(part: Part) -> str:
    entries = [
        (entry.key, entry.offset, entry.tensor.shape, str(entry.tensor.dtype))
        for entry in part.entries
    ]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _weights_of(folder: Path) -> Path | None:
    """Where the weights of a checkpoint are; None for what is no checkpoint."""
    return weights_folder(folder) if recognise(folder) is not None else None
