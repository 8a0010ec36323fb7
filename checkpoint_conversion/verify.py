"""``verify``: compare two checkpoints with each other, and each with its manifest."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import recognise
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.logit_comparison import (
    LogitComparison,
    Source,
    compare_in_subprocess,
    why_not,
)
from checkpoint_conversion.manifest import find_manifest
from checkpoint_conversion.megatron_args import megatron_notes, routing_notes
from checkpoint_conversion.model_comparison import compare_models
from checkpoint_conversion.progress import Reporter
from checkpoint_conversion.verification_report import VerificationReport

# For float32 sums in another order, as by another library.
LOGITS_TOLERANCE = 1e-4
# Their logits take 270 MB with a vocabulary of 130 000 entries.
MOST_TOKENS = 512


def verify(
    a: Path,
    b: Path | None = None,
    *,
    hf_config: Path | None = None,
    follow_links: bool = False,
    exclude_mtp: bool = False,
    tolerance: float = 0.0,
    logits: bool | None = None,
    logits_tolerance: float = LOGITS_TOLERANCE,
    text: Path | None = None,
    max_tokens: int = MOST_TOKENS,
    workers: int | None = None,
    reporter: Reporter | None = None,
) -> VerificationReport:
    """Compare two checkpoints, tensor by tensor, and each with the manifest beside it.

    Args:
        a: Folder of a checkpoint of any format.
        b: Folder of another one; None only compares ``a`` with its manifest.
        hf_config: A config.json for Megatron checkpoints, which overrides their own.
        follow_links: Whether links may lead out of the folders.
        exclude_mtp: Compare without the multi-token-prediction layers.
        tolerance: Largest relative error of a tensor that is accepted.
        logits: Whether to compare what the models predict; None: if they can be evaluated here.
        logits_tolerance: Largest relative error of the logits that is accepted.
        text: A file with the text to predict; None: a built-in one.
        max_tokens: Upper bound on the tokens of it that are used.
        workers: Threads that read; None: one per core, up to 4.
        reporter: Receives progress messages.

    Raises:
        CheckpointError: If a checkpoint cannot be read, ``a`` alone has no manifest, or
            ``logits=True`` and they cannot be computed.
    """
    started = time.monotonic()
    _check_tolerances({"--tolerance": tolerance, "--logits-tolerance": logits_tolerance})
    paths = [a] if b is None else [a, b]
    if b is None:
        _check_single(a, {"--exclude-mtp": exclude_mtp, "--logits": logits, "--text": text})
    sources = [
        Source(path, config, follow_links)
        for path, config in zip(paths, _configs(paths, hf_config))
    ]
    checkpoints = [source.open() for source in sources]
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
    if find_manifest(path) is None and recognise(path) is not None:
        raise CheckpointError(
            f"{path} has no conversion_manifest.json to be compared with; give a second checkpoint"
        )


def _configs(paths: Sequence[Path], hf_config: Path | None) -> list[Path | None]:
    """The ``hf_config`` for each checkpoint; None for Hugging Face's, which have their own."""
    own = [getattr(recognise(path), "format", None) == "hf" for path in paths]
    if hf_config is not None and all(own):
        raise CheckpointError("--hf-config is for Megatron checkpoints; there is none")
    return [None if has_own else hf_config for has_own in own]


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
        if reasons:
            raise CheckpointError("The logits cannot be compared here:", reasons)
        a = checkpoints[0].config
        most = min(max_tokens, *(_positions(checkpoint) for checkpoint in checkpoints))
        # The second checkpoint's tokenizer, if the first has none.
        auxiliary = {**checkpoints[1].auxiliary, **checkpoints[0].auxiliary}
        tokens, origin = sample_tokens(auxiliary, a.vocab_size, most, text)
        return compare_in_subprocess(sources, tokens, origin), notes
    except CheckpointError as error:
        if wanted:
            raise
        return None, [*notes, "logits were not compared: " + "; ".join(str(error).splitlines())]


def _positions(checkpoint: Checkpoint) -> int:
    return int(checkpoint.config.hugging_face["max_position_embeddings"])


def _notes(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Where Megatron computes something else with the same weights, one line each."""
    functions = {"megatron": megatron_notes, "megatron-legacy": megatron_notes}
    notes = [
        note
        for checkpoint in checkpoints
        if checkpoint.format != "hf"
        for note in functions.get(checkpoint.format, routing_notes)(checkpoint.config)
    ]
    return list(dict.fromkeys(notes))


TEXT = """\
Keeping every key and value of a long conversation is what makes serving a language model dear. A
latent attention keeps less: for each token one short vector, from which the keys and the values of
all heads can be computed again, and a few rotated channels that say where the token stood.

def attend(query, latent, rotated, scale):
    scores = scale * (query.nope @ latent.T + query.rope @ rotated.T)
    return softmax(scores.masked_fill(future, -inf)) @ latent

Two programs that hold the same weights ought to agree about what comes next. If one of them turns
the channels of its rotary embedding by pairs of neighbours, and the other by halves, both still
write fluent sentences at first; after some hundred words, they part. In 2024 it was 3.14 % of all
tickets; les chiffres de 2025 n'en disent pas plus, und die Gründe sind bis heute unklar: \
これは何ですか?
"""
# Bytes of a user's file that are read.
_MOST_BYTES = 16 << 20


def sample_tokens(
    auxiliary: Mapping[str, Path], vocab_size: int, most: int, text: Path | None = None
) -> tuple[list[int], str]:
    """Token ids of a text.

    Args:
        auxiliary: Files that belong to the checkpoint; its ``tokenizer.json`` is used if there.
        vocab_size: Size of the model's vocabulary.
        most: Upper bound on the number of tokens, from the beginning of the text.
        text: A file of UTF-8 text; None for a built-in one.

    Returns:
        The ids, and a phrase that says where they come from.

    Raises:
        CheckpointError: If the text is empty or no UTF-8, or the tokenizer cannot be used.
    """
    content = TEXT if text is None else _read(text)
    source = "a built-in text" if text is None else text.name
    if "tokenizer.json" not in auxiliary:
        ids = [byte % vocab_size for byte in content.encode()[:most]]
        return ids, f"{len(ids)} bytes of {source}; the checkpoint has no tokenizer.json"
    ids = _tokenize(auxiliary["tokenizer.json"], content)[:most]
    if not ids or max(ids) >= vocab_size:
        raise CheckpointError(
            f"tokenizer.json makes {len(ids)} tokens of {source}, the largest {max(ids, default=0)}"
            f"; the model's vocabulary has {vocab_size}"
        )
    return ids, f"{len(ids)} tokens of {source}, by the checkpoint's tokenizer.json"


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"--text: {path} is no UTF-8 text: {error}") from None
    if not text.strip():
        raise CheckpointError(f"--text: {path} is empty")
    return text


def _tokenize(path: Path, text: str) -> list[int]:
    # tokenizer.json is pure data; other tokenizers would run code of the checkpoint.
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).encode(text).ids
    except Exception as error:
        # The library raises nothing more specific.
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
