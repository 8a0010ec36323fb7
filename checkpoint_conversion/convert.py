"""Converting a checkpoint: plan it, write it part by part into a temporary folder, rename that."""

from __future__ import annotations

import errno
import shutil
import time
from pathlib import Path
from typing import Any

from checkpoint_conversion import __version__
from checkpoint_conversion.checkpoint_folder import MANIFEST, weights_folder, weights_of
from checkpoint_conversion.errors import raise_problems
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import Part, PartResult, TargetOptions
from checkpoint_conversion.journal import Journal, differences, files_are_there
from checkpoint_conversion.lazy_tensor import ReadSession
from checkpoint_conversion.manifest import Manifest, find_manifest, read_manifest, write_manifest
from checkpoint_conversion.part_runner import (
    Committer,
    MemoryBudget,
    file_errors,
    peak_resident,
    resident,
    run_parts,
)
from checkpoint_conversion.planning import (
    ConversionPlan,
    checksum_of,
    fingerprint_of,
    options_as_json,
    plan_conversion,
    source_files,
)
from checkpoint_conversion.progress import Reporter, format_bytes
from checkpoint_conversion.report import ConversionReport, not_finite_line, worst_errors
from checkpoint_conversion.router_comparison import only_megatrons
from checkpoint_conversion.target_folder import TargetFolder, check_places, refuse_existing

# May exceed the number of cores: threads mostly wait for the disk, and memory limits them.
_WORKERS = 4
# The process stays below 2.5 times the largest tensor + 600 MB, of which 100 MB are a reserve for
# allocations that are not tracked.
_TOTAL, _UNCOUNTED = 600 * 10**6, 100 * 10**6
# Parts together may use two of the largest tensor and this, even where more memory is left.
_ALLOWANCE = 200 * 10**6


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
    strict_values: bool = False,
    dry_run: bool = False,
    reporter: Reporter | None = None,
    **how: Any,
) -> ConversionReport:
    """Convert a checkpoint.

    If it is interrupted, ``target`` is as it was before, and the finished parts stay in a folder
    beside it for ``resume``.

    Args:
        source: The checkpoint's folder; nothing is written there.
        target: Folder to make.
        to: Format of the target, one of ``formats.TARGETS``.
        options: How the target is written.
        force: Replace a target that is a checkpoint or empty, after success.
        resume: Continue an interrupted conversion, if there is one.
        exclude_mtp: Leave out the multi-token-prediction layers.
        workers: Threads that read and write; None: 4.
        strict_values: Refuse tensors that hold NaN or infinite values, instead of reporting them.
        dry_run: Only plan, from the headers; write nothing.
        reporter: Receives progress messages.
        how: Further fields of :class:`Source`.

    Raises:
        CheckpointError: If the source cannot be read or converted, or the target may not be
            written. Whatever headers show is checked before the first byte is written.
        OSError: If the file system fails, for instance because the disk is full.
    """
    started = time.monotonic()
    options, reporter = options or TargetOptions(), reporter or Reporter()
    check_places(source, target)
    if not resume:
        refuse_existing(target, force, weights_of)
    checkpoint = open_checkpoint(source, **how)
    if to == "hf":
        problems = only_megatrons(checkpoint.config)
        raise_problems(
            "transformers would choose other experts, or weigh them otherwise:", problems
        )
    plan = plan_conversion(checkpoint, to, options, exclude_mtp)
    if dry_run:
        return ConversionReport(plan=plan, target=target, dry_run=True)
    folder = TargetFolder(target, force, weights_of)
    conversion = _Conversion(
        plan, folder, fingerprint_of(plan, options, how.get("hf_config")), reporter, strict_values
    )
    try:
        with folder:
            manifest = conversion.finished() if resume else None
            if manifest is None:
                manifest = conversion.run(resume, workers or _WORKERS)
    except KeyboardInterrupt:
        # Interrupted after the rename: the target is complete.
        if not conversion.published:
            raise
        reporter.say("interrupted when the conversion was complete; nothing was left to do")
        folder.remove_replaced()
        folder.close()
        manifest = read_manifest(weights_folder(target) / MANIFEST)
    return ConversionReport(
        plan=plan,
        target=target,
        resumed_parts=conversion.resumed_parts,
        fp8_errors=manifest.fp8_errors,
        not_finite=tuple(record for record in manifest.tensors if record.not_finite),
        seconds=time.monotonic() - started,
        bytes_written=conversion.bytes_written,
        peak_rss=peak_resident(),
    )


def memory_for(plan: ConversionPlan) -> int:
    """Memory budget in bytes of all parts that are written at the same time.

    What is resident already, torch and the plan itself, is subtracted.
    """
    left = 5 * plan.largest // 2 + _TOTAL - _UNCOUNTED - resident()
    # At least one part must fit.
    return max(min(2 * plan.largest + _ALLOWANCE, left), *(part.peak for part in plan.parts))


class _Conversion:
    """One conversion, from an empty or unfinished folder to the target."""

    def __init__(
        self,
        plan: ConversionPlan,
        folder: TargetFolder,
        fingerprint: dict,
        reporter: Reporter,
        strict_values: bool,
    ) -> None:
        self._plan, self._folder, self._reporter = plan, folder, reporter
        self._fingerprint, self._strict_values = fingerprint, strict_values
        self._publishing = False
        self._budget = MemoryBudget(memory_for(plan))
        self.resumed_parts = self.bytes_written = 0

    @property
    def published(self) -> bool:
        """Whether the target has got its name."""
        return self._publishing and not self._folder.contents.exists()

    def finished(self) -> Manifest | None:
        """The manifest of the target if the same conversion has made it already."""
        path = find_manifest(self._folder.path)
        if path is None:
            return None
        manifest = read_manifest(path)
        same = manifest.conversion == checksum_of(self._fingerprint)
        if not same or not files_are_there(self._folder.path, manifest.files):
            return None
        self._check_values(manifest)
        self._reporter.say("this conversion is complete already")
        self.resumed_parts = len(self._plan.parts)
        return manifest

    def run(self, resume: bool, workers: int) -> Manifest:
        """Do all of it."""
        journal = self._open_journal(resume)
        self.resumed_parts = len(journal.results)
        try:
            self._check_values(*journal.results.values())
            self._write_parts(journal, workers)
            manifest = self._finish([journal.results[part.name] for part in self._plan.parts])
            self._publishing = True
            self._folder.publish(manifest.files)
            self._folder.remove_replaced()
        except (Exception, KeyboardInterrupt) as error:
            if not journal.results:
                self._folder.discard()
            elif self._folder.contents.exists():
                error.add_note(
                    f"{len(journal.results)} of {len(self._plan.parts)} parts are finished and "
                    "kept; --resume continues after them."
                )
            raise
        finally:
            journal.close()
            self._reporter.finish()
        return manifest

    def _open_journal(self, resume: bool) -> Journal:
        folder = self._folder
        folder.refuse_existing()
        journal = Journal.resume(folder.journal, self._fingerprint) if resume else None
        if journal is None or not folder.contents.exists():
            if folder.start():
                self._reporter.say("removed what an interrupted conversion had left")
            elif resume:
                self._reporter.say("there is nothing to resume; starting anew")
            return Journal.create(folder.journal, self._fingerprint)
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

        def write(part: Part) -> PartResult:
            with ReadSession() as session, file_errors(part.name):
                result = self._plan.writer.write_part(
                    self._folder.contents, part, session, progress
                )
            self._check_values(result)
            return result

        def commit(results: list[PartResult]) -> None:
            # In this order, so that the journal lists only what is on disk.
            self._folder.sync_files([file for result in results for file in result.files])
            journal.add(*results)

        with Committer(commit, self._budget.stop, beside=workers > 1) as committer:
            run_parts(parts, write, self._budget, workers, committer.submit)
        self.bytes_written = left

    def _check_values(self, *written: PartResult | Manifest) -> None:
        """Under ``strict_values``, refuse tensors with values that are not finite."""
        if not self._strict_values:
            return
        records = (record for one in written for record in one.tensors)
        found = [not_finite_line(record) for record in records if record.not_finite]
        raise_problems("--strict-values: tensors hold values not finite:", found)

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

    def _finish(self, results: list[PartResult]) -> Manifest:
        """Write the files around the parts, the manifest last."""
        now = source_files(self._plan.checkpoint.path)
        changed = list(differences(self._fingerprint["source file"], now))
        raise_problems("The source was changed while it was being read:", changed)
        source, writer, contents = self._plan.checkpoint, self._plan.writer, self._folder.contents
        with file_errors(str(self._folder.path)):
            writer.finish(contents, results, source.auxiliary)
        records = tuple(record for result in results for record in result.tensors)
        manifest = Manifest(
            tool_version=__version__,
            source={
                "format": source.format,
                "layout": source.layout,
                "folder": source.path.resolve().name,
            },
            target={
                "format": writer.format,
                "layout": writer.layout(),
                "options": options_as_json(writer.options),
            },
            left_out=self._plan.left_out,
            files={name: size for result in results for name, size in result.files.items()},
            tensors=records,
            conversion=checksum_of(self._fingerprint),
            fp8_errors=worst_errors(records),
        )
        write_manifest(manifest, contents)
        return manifest
