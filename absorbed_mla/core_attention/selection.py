"""The choice of form and backend of an attention call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest
from absorbed_mla.core_attention.cost import (
    MEASURED_GPU,
    Work,
    machine_name,
    rates_on,
    search_seconds,
    seconds,
)
from absorbed_mla.core_attention.invariant_hopper import InvariantHopper
from absorbed_mla.core_attention.tiled_reference import TiledReferenceBackend
from absorbed_mla.dims import MLADims
from absorbed_mla.log_once import log_once
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import ATTENTION_BACKENDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """What could run a call, and why the rest cannot.

    Attributes:
        able: Pairs of a form and a backend.
        refused: A line for every other pair.
        automatic: Whether there was a choice to make: of the form, the backend or both.
        device: Of the call.
        small_max_logits: See ``AttentionRequest``.
    """

    able: tuple[tuple[str, AttentionBackend], ...]
    refused: tuple[str, ...]
    automatic: bool
    device: torch.device
    small_max_logits: bool = False


def candidates(requests: Mapping[str, AttentionRequest], backend: str) -> Candidates:
    """Ask the backends, whose answers depend on the kind of call but not on its sequences.

    Args:
        requests: What a backend must be able to do, for every form that may run.
        backend: The only backend that may run, or ``"auto"``.

    Raises:
        ValueError: If there is no such backend, or it can run none of the forms.
    """
    able, refused = [], []
    for form, request in requests.items():
        runnable, reasons = ATTENTION_BACKENDS.examine(backend, request)
        able += [(form, entry) for entry in runnable]
        refused += [f"{name} ({form}): {reason}" for name, reason in reasons.items()]
    if not able:
        raise ValueError(
            f"core_attention_backend={backend!r} cannot run here: {'; '.join(refused)}"
        )
    automatic = len(requests) > 1 or backend == "auto"
    one = next(iter(requests.values()))
    return Candidates(tuple(able), tuple(refused), automatic, one.device, one.small_max_logits)


def fastest(found: Candidates, dims: MLADims, work: Work) -> tuple[str, AttentionBackend]:
    """The form and the backend with the least estimated time.

    Args:
        found: From :func:`candidates`.
        dims: Of the layer.
        work: Amount of work on one rank.
    """
    machine = machine_name(found.device)

    def estimate(candidate: tuple[str, AttentionBackend]) -> tuple[float, float]:
        form, entry = candidate
        duration = seconds(form, entry, dims, work, machine)
        # Nothing is searched, or little, where the largest scores are below QK-clip's threshold.
        if found.small_max_logits and entry.searches_max_logits:
            duration += search_seconds(dims, work, machine)
        return duration, -rates_on(MEASURED_GPU, entry)[0]

    form, chosen = min(found.able, key=estimate)
    if found.automatic:
        able = ", ".join(f"{name} {entry.name}" for name, entry in found.able)
        log_once(
            logger,
            f"'auto' runs form={form} with core_attention_backend={chosen.name}",
            f"the least estimated time of {able}; refused: {'; '.join(found.refused) or 'none'}",
        )
    return form, chosen


def choose(
    requests: Mapping[str, AttentionRequest], backend: str, dims: MLADims, work: Work
) -> tuple[str, AttentionBackend]:
    """:func:`fastest` of the :func:`candidates`."""
    return fastest(candidates(requests, backend), dims, work)


def invariant_name(options: AbsorbedMLAOptions, request: AttentionRequest) -> str:
    """The backend of training and of a cache in parity mode.

    Args:
        options: Of the layer.
        request: What training needs, in the absorbed form.
    """
    name = options.core_attention_backend
    if name != "auto":
        return name
    if request.device.type != "cuda":
        return "reference"
    return "triton" if ATTENTION_BACKENDS["hopper"].why_not(request) else "hopper"


def choose_batch_invariant(
    request: AttentionRequest, name: str, key_blocks: int
) -> AttentionBackend:
    """The backend of the absorbed form that gives a token the same bits in every batch.

    Args:
        request: What it must be able to do, in the absorbed form.
        name: ``"hopper"``, ``"triton"`` or ``"reference"``.
        key_blocks: Number of blocks that the keys come in.

    Raises:
        ValueError: If no backend can do that.
    """
    refused = {
        "it takes no attention_mask": request.masked,
        "it drops nothing (attention_dropout=0)": request.dropout,
        "keys must lie on one rank (no context parallelism)": key_blocks != 1,
        "core_attention_backend='reference' is batch-invariant on the CPU only": name == "reference"
        and request.device.type != "cpu",
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    if name != "reference" and not reasons:
        refusals = ATTENTION_BACKENDS.examine(name, request)[1]
        reasons = [f"{name}: {reason}" for reason in refusals.values()]
    if reasons:
        raise ValueError(f"batch_invariant=True cannot run here: {'; '.join(reasons)}")
    made = {"reference": TiledReferenceBackend, "hopper": InvariantHopper}
    return made[name]() if name in made else ATTENTION_BACKENDS[name]
