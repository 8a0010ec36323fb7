"""Comparing the logits of two checkpoints for one text, in a subprocess.

Megatron needs a process group and, on a CPU, a patched ``torch.cuda``; the subprocess keeps both
out of the caller's process and frees the memory of both models at its end.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint_conversion.errors import CheckpointError
from checkpoint_conversion.formats import open_checkpoint
from checkpoint_conversion.formats.base import Checkpoint
from checkpoint_conversion.mapping import count_parameters, hugging_face_shapes
from checkpoint_conversion.progress import format_bytes
from checkpoint_conversion.source import Source

# Positions whose probabilities are computed at a time, in float64.
_CHUNK = 32
# Bytes of a user's text that are read.
_MOST_BYTES = 16 << 20
_NEEDED = {
    "hf": ("transformers",),
    "megatron": ("megatron.core", "psutil"),
    "megatron-legacy": ("megatron.core", "psutil"),
    "absorbed": ("megatron.core", "psutil"),
}


@dataclass(frozen=True, kw_only=True)
class LogitComparison:
    """Difference between the logits of two models A and B.

    Attributes:
        max_abs: Largest difference of two logits.
        max_rel: The same, relative to the largest logit of A.
        kl_mean: Kullback-Leibler divergence of B from A in nats, mean over the positions.
        kl_max: Its largest value at a position.
        tokens: Number of positions.
        same_choice: Fraction of positions where both have the same most likely token.
        origin: Where the tokens come from.
        evaluated_by: Library that evaluated A, and B.
    """

    max_abs: float
    max_rel: float
    kl_mean: float
    kl_max: float
    tokens: int
    same_choice: float
    origin: str = ""
    evaluated_by: tuple[str, str] = ("", "")


def compare_logits(a: Tensor, b: Tensor, **about: Any) -> LogitComparison:
    """Compare logits [B, S, vocabulary].

    Args:
        a: The reference.
        b: To compare with it.
        about: ``origin`` and ``evaluated_by``, passed on to the result.
    """
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    kl = torch.cat([_divergence(x, y) for x, y in zip(a.split(_CHUNK), b.split(_CHUNK))])
    max_abs = float((a - b).abs().max())
    return LogitComparison(
        max_abs=max_abs,
        max_rel=max_abs / float(a.abs().max()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        tokens=a.shape[0],
        same_choice=float((a.argmax(-1) == b.argmax(-1)).double().mean()),
        **about,
    )


def why_not(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Reasons why the logits of two checkpoints cannot be computed here; none if they can."""
    for side, checkpoint in (("A", a), ("B", b)):
        for package in _NEEDED[checkpoint.format]:
            if not _installed(package):
                yield f"{side} ({checkpoint.format}) needs {package}, which is not installed"
    if a.config.vocab_size != b.config.vocab_size:
        yield f"the vocabularies have {a.config.vocab_size} and {b.config.vocab_size} entries"
    available = _available_memory()
    for side, checkpoint in (("A", a), ("B", b)):
        shapes = hugging_face_shapes(checkpoint.config)
        needed = 4 * count_parameters(shapes, checkpoint.config)
        if needed > available / 2:
            yield (
                f"{side} needs {format_bytes(needed)} in float32; half of the available memory is "
                f"{format_bytes(available / 2)}"
            )


def compare_in_subprocess(
    sources: Sequence[Source], tokens: list[int], origin: str
) -> LogitComparison:
    """Evaluate two checkpoints on the CPU.

    Args:
        sources: The reference and the other one.
        tokens: Ids of one sequence.
        origin: Where they come from.

    Raises:
        CheckpointError: If it fails, with the last lines of the process's stderr.
    """
    sides = [asdict(source) for source in sources]
    request = {"sides": sides, "tokens": tokens, "origin": origin}
    with tempfile.TemporaryDirectory(prefix="logits-") as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", __name__, str(answer)]
        done = subprocess.run(
            command,
            input=json.dumps(request, default=str),
            env=_environment(),
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not answer.exists():
            raise CheckpointError(*_failure(done))
        document = json.loads(answer.read_text())
    return LogitComparison(**{**document, "evaluated_by": tuple(document["evaluated_by"])})


def main() -> None:
    """Main function of the subprocess: reads a request from stdin, writes the answer to a file."""
    request = json.load(sys.stdin)
    from checkpoint_conversion.logits import checkpoint_logits, library

    tokens = torch.tensor([request["tokens"]])
    logits, libraries = [], []
    try:
        for side in request["sides"]:
            hf_config = side["hf_config"] and Path(side["hf_config"])
            place = {"path": Path(side["path"]), "hf_config": hf_config}
            checkpoint = open_checkpoint(**{**side, **place})
            logits.append(checkpoint_logits(checkpoint, tokens))
            libraries.append(library(checkpoint))
    except CheckpointError as error:
        sys.exit(str(error))
    result = compare_logits(*logits, origin=request["origin"], evaluated_by=tuple(libraries))
    Path(sys.argv[1]).write_text(json.dumps(asdict(result)))


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


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) per position, in nats, float64."""
    log_a, log_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
    # Rounding can make it slightly negative.
    return (log_a.exp() * (log_a - log_b)).sum(-1).clamp_min(0)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _available_memory() -> int:
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _environment() -> dict[str, str]:
    """Environment of the subprocess: the same packages, no GPU, no network."""
    here = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def _failure(done: subprocess.CompletedProcess) -> tuple[str, list[str]]:
    if done.returncode < 0:
        why = f"was ended by signal {-done.returncode}; it may have needed more memory"
        return f"The process that computes logits {why}.", []
    return "The logits could not be computed:", done.stderr.strip().splitlines()[-10:]


if __name__ == "__main__":
    main()
