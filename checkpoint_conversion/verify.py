"""``verify``: compare two checkpoints with each other, and each with its manifest."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from checkpoint_conversion.checkpoint_folder import kind_of
from checkpoint_conversion.comparison import (
    ManifestComparison,
    TensorComparison,
    compare_tensors,
    peak_of_slab,
)
from checkpoint_conversion.errors import CheckpointError, raise_problems
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.lazy_tensor import LazyTensor
from checkpoint_conversion.logit_comparison import (
    LogitComparison,
    compare_in_subprocess,
    sample_tokens,
    why_not,
)
from checkpoint_conversion.manifest import find_manifest, read_manifest
from checkpoint_conversion.mapping import without_mtp_layers
from checkpoint_conversion.megatron_args import megatron_notes, model_notes
from checkpoint_conversion.model import ModelConfig, ModelFunction, read_function
from checkpoint_conversion.part_runner import MemoryBudget, run_parts
from checkpoint_conversion.progress import Reporter
from checkpoint_conversion.report import Side, VerificationReport
from checkpoint_conversion.source import Source

# For float32 sums in another order, as by another library.
LOGITS_TOLERANCE = 1e-4
_MOST_WORKERS = 4
# Memory budget in bytes of all threads; a tensor that cannot be read in parts may exceed it.
_MEMORY = 512 << 20
# Their logits take 270 MB with a vocabulary of 130 000 entries.
MOST_TOKENS = 512


def verify(
    a: Path,
    b: Path | None = None,
    *,
    exclude_mtp: bool = False,
    tolerance: float = 0.0,
    logits: bool | None = None,
    logits_tolerance: float = LOGITS_TOLERANCE,
    text: Path | None = None,
    max_tokens: int = MOST_TOKENS,
    workers: int | None = None,
    reporter: Reporter | None = None,
    **how: Any,
) -> VerificationReport:
    """Compare two checkpoints, tensor by tensor, and each with the manifest beside it.

    Args:
        a: Folder of a checkpoint of any format.
        b: Folder of another one; None only compares ``a`` with its manifest.
        exclude_mtp: Compare without the multi-token-prediction layers.
        tolerance: Largest relative error of a tensor that is accepted.
        logits: Whether to compare what the models predict; None: if they can be evaluated here.
        logits_tolerance: Largest relative error of the logits that is accepted.
        text: A file with the text to predict; None: a built-in one.
        max_tokens: Upper bound on the tokens of it that are used.
        workers: Threads that read; None: one per core, up to 4.
        reporter: Receives progress messages.
        how: Further fields of :class:`Source`.

    Raises:
        CheckpointError: If a checkpoint cannot be read, ``a`` alone has no manifest, or
            ``logits=True`` and they cannot be computed.
    """
    started = time.monotonic()
    _check_tolerances({"--tolerance": tolerance, "--logits-tolerance": logits_tolerance})
    paths = [a] if b is None else [a, b]
    if b is None:
        _check_single(a, {"--exclude-mtp": exclude_mtp, "--logits": logits, "--text": text})
    sources = _sources(paths, how)
    checkpoints = [open_checkpoint(**vars(source)) for source in sources]
    reporter = reporter or Reporter()
    report = compare_models(checkpoints, exclude_mtp, workers, reporter)
    if b is not None and logits is not False:
        reporter.say("computing what both models predict")
        compared, notes = _logits(checkpoints, sources, logits, text, max_tokens)
        report = replace(report, logits=compared, notes=tuple(notes))
    return replace(
        report,
        tolerance=tolerance,
        logits_tolerance=logits_tolerance,
        seconds=time.monotonic() - started,
    )


def _check_tolerances(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise CheckpointError(f"{name} must be a number of at least 0, got {value}")


def _check_single(path: Path, options: Mapping[str, object]) -> None:
    """Check the arguments for one checkpoint: no option that needs two, and a manifest."""
    given = [name for name, value in options.items() if value]
    if given:
        raise CheckpointError(f"{', '.join(given)} can only be used with two checkpoints")
    if find_manifest(path) is None and kind_of(path) is not None:
        raise CheckpointError(
            f"{path} has no conversion_manifest.json to be compared with; give a second checkpoint"
        )


def _sources(paths: Sequence[Path], how: Mapping[str, Any]) -> list[Source]:
    """How to open each checkpoint; ``hf_config`` and ``drop_tokens`` are not for Hugging Face's."""
    own = [kind_of(path) == "hugging_face" for path in paths]
    for name in ("hf_config", "drop_tokens"):
        if how.get(name) and all(own):
            option = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{option} is for Megatron checkpoints; there is none")
    sources = [Source(path, **how) for path in paths]
    for_hf = {"hf_config": None, "drop_tokens": False}
    return [replace(one, **for_hf) if hf else one for one, hf in zip(sources, own)]


def _logits(
    checkpoints: Sequence[Checkpoint],
    sources: Sequence[Source],
    wanted: bool | None,
    text: Path | None,
    max_tokens: int,
) -> tuple[LogitComparison | None, list[str]]:
    """The comparison, or None if it is impossible and not ``wanted``; and notes about it."""
    notes = _notes(checkpoints)
    try:
        reasons = list(why_not(*checkpoints))
        raise_problems("The logits cannot be compared here:", reasons)
        a = checkpoints[0].config
        positions = [_function(c.config).max_position_embeddings for c in checkpoints]
        # The second checkpoint's tokenizer, if the first has none.
        auxiliary = {**checkpoints[1].auxiliary, **checkpoints[0].auxiliary}
        tokens, origin = sample_tokens(auxiliary, a.vocab_size, min(max_tokens, *positions), text)
        return compare_in_subprocess(sources, tokens, origin), notes
    except CheckpointError as error:
        if wanted:
            raise
        return None, [*notes, "logits were not compared: " + "; ".join(str(error).splitlines())]


def _notes(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Where Megatron computes something else with the same weights, one line each."""
    functions = {"megatron": megatron_notes, "megatron-legacy": megatron_notes}
    notes = [
        note
        for checkpoint in checkpoints
        if checkpoint.format != "hf"
        for note in functions.get(checkpoint.format, model_notes)(checkpoint.config)
    ]
    return list(dict.fromkeys(notes))


@dataclass(frozen=True)
class _Task:
    """A unit of work for a thread: memory in bytes that it needs, bytes that it reads, function."""

    peak: int
    nbytes: int
    run: Callable[[], None]


def compare_models(
    checkpoints: Sequence[Checkpoint], exclude_mtp: bool, workers: int | None, reporter: Reporter
) -> VerificationReport:
    """Read all tensors and compare them.

    Raises:
        CheckpointError: If a manifest or a tensor cannot be read.
    """
    manifests = [_manifest_comparison(checkpoint) for checkpoint in checkpoints]
    tasks = [
        _Task(peak_of_slab(block), block.nbytes, partial(manifest.compare_values, record, block))
        for manifest in manifests
        if manifest is not None
        for record, block in manifest.blocks
    ]
    pair = _Pair(checkpoints, exclude_mtp) if len(checkpoints) == 2 else None
    tasks += pair.tasks() if pair is not None else []
    _run(tasks, workers, reporter)
    sums = (None, None) if pair is None else pair.model_checksums()
    return VerificationReport(
        sides=tuple(
            Side(
                path=str(checkpoint.path),
                format=checkpoint.format,
                checksum=checksum,
                manifest=None if manifest is None else manifest.result(),
            )
            for checkpoint, manifest, checksum in zip(checkpoints, manifests, sums)
        ),
        nbytes=sum(task.nbytes for task in tasks),
        **(pair.result() if pair is not None else {}),
    )


def _manifest_comparison(checkpoint: Checkpoint) -> ManifestComparison | None:
    path = find_manifest(checkpoint.path)
    return None if path is None else ManifestComparison(read_manifest(path), checkpoint.stored)


def _run(tasks: Sequence[_Task], workers: int | None, reporter: Reporter) -> None:
    reporter.start(sum(task.nbytes for task in tasks), 0)

    def work(task: _Task) -> None:
        task.run()
        reporter.advance(task.nbytes)

    try:
        workers = workers or min(_MOST_WORKERS, os.cpu_count() or 1)
        run_parts(tasks, work, MemoryBudget(_MEMORY), workers)
    finally:
        reporter.finish()


class _Pair:
    """The tensors of two models."""

    def __init__(self, checkpoints: Sequence[Checkpoint], exclude_mtp: bool) -> None:
        self._sides: list[dict[str, LazyTensor]] = []
        self._left_out: dict[str, str] = {}
        for checkpoint in checkpoints:
            tensors = checkpoint.hugging_face_tensors()
            kept = without_mtp_layers(tensors, checkpoint.config) if exclude_mtp else tensors
            self._left_out.update(dict.fromkeys(tensors.keys() - kept.keys(), "--exclude-mtp"))
            self._sides.append(kept)
        configs = [c.config for c in checkpoints]
        self._configs = config_differences(configs[0], configs[1], exclude_mtp)
        a, b = self._sides
        both = sorted(a.keys() & b.keys())
        self._common = [name for name in both if a[name].shape == b[name].shape]
        self._shapes = {n: (a[n].shape, b[n].shape) for n in both if a[n].shape != b[n].shape}
        self._results: dict[str, TensorComparison] = {}

    def tasks(self) -> Iterator[_Task]:
        """One task per tensor that both models have in the same shape."""
        for name in self._common:
            a, b = (tensors[name] for tensors in self._sides)
            peak = peak_of_slab(a) + peak_of_slab(b)
            yield _Task(peak, a.nbytes + b.nbytes, partial(self._compare, name, a, b))

    def _compare(self, name: str, a: LazyTensor, b: LazyTensor) -> None:
        self._results[name] = compare_tensors(name, a, b)

    def result(self) -> dict:
        """Fields of the report, after all tasks."""
        a, b = self._sides
        differences = [r.difference for r in self._results.values() if r.difference is not None]
        # The worst first.
        differences.sort(key=lambda d: (-d.not_finite, -d.max_rel, d.name))
        return {
            "tensors": len(self._common),
            "configs": self._configs,
            "only_in_a": tuple(sorted(a.keys() - b.keys())),
            "only_in_b": tuple(sorted(b.keys() - a.keys())),
            "shapes": self._shapes,
            "differences": tuple(differences),
            "left_out": dict(sorted(self._left_out.items())),
        }

    def model_checksums(self) -> tuple[str | None, str | None]:
        """Checksum of each model; None for one with tensors that were not compared."""
        first, second = (
            None if len(tensors) > len(self._common) else self._checksum(side, tensors)
            for side, tensors in enumerate(self._sides)
        )
        return first, second

    def _checksum(self, side: int, tensors: Mapping[str, LazyTensor]) -> str:
        whole = xxhash.xxh3_128()
        for name in self._common:
            tensor = tensors[name]
            checksum = self._results[name].checksums[side]
            whole.update(f"{name} {tensor.dtype} {tensor.shape} {checksum}\n".encode())
        return whole.hexdigest()


def config_differences(
    a: ModelConfig, b: ModelConfig, exclude_mtp: bool = False
) -> dict[str, tuple[object, object]]:
    """Fields in which two models differ in dimensions or function: name -> both values."""
    first, second = _meaning(a), _meaning(b)
    if exclude_mtp:
        del first["mtp_layers"], second["mtp_layers"]
    return {
        name: (first.get(name), second.get(name))
        for name in first | second
        if first.get(name) != second.get(name)
    }


def _meaning(config: ModelConfig) -> dict[str, object]:
    dimensions = asdict(config)
    # Kimi-K2 is a DeepSeek-V3 by another name.
    del dimensions["hugging_face"], dimensions["model_type"]
    function = asdict(_function(config))
    for section in ("rotary", "routing"):
        function |= function.pop(section) or {}
    return dimensions | function


def _function(config: ModelConfig) -> ModelFunction:
    return read_function(config.fields, config)
