"""Which form runs on which backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from absorbed_mla.batch_invariant.requirements import backend_for
from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest
from absorbed_mla.core_attention.cost import Work, machine_name, rates_on, seconds
from absorbed_mla.core_attention.tiled_reference import TiledReferenceBackend
from absorbed_mla.dims import MLADims
from absorbed_mla.log_once import log_once
from absorbed_mla.registry import ATTENTION_BACKENDS

logger = logging.getLogger(__name__)
# Where two backends are estimated equal, as on machines without measurements, the one that is
# faster here is taken.
_REFERENCE_MACHINE = "NVIDIA H200"


def choose(
    requests: Mapping[str, AttentionRequest], backend: str, dims: MLADims, work: Work
) -> tuple[str, AttentionBackend]:
    """The form and the backend with the least estimated time.

    Args:
        requests: What a backend must be able to do, for every form that may run.
        backend: The only backend that may run, or ``"auto"``.
        dims: Of the layer.
        work: Amount of work on one rank.

    Raises:
        ValueError: If there is no such backend, or it can run none of the forms.
    """
    candidates, refused = [], []
    for form, request in requests.items():
        runnable, reasons = ATTENTION_BACKENDS.examine(backend, request)
        candidates += [(form, entry) for entry in runnable]
        refused += [f"{name} ({form}): {reason}" for name, reason in reasons.items()]
    if not candidates:
        raise ValueError(
            f"core_attention_backend={backend!r} cannot run here: {'; '.join(refused)}"
        )
    machine = machine_name(next(iter(requests.values())).device)

    def estimate(candidate: tuple[str, AttentionBackend]) -> tuple[float, float]:
        form, entry = candidate
        return seconds(form, entry, dims, work, machine), -rates_on(_REFERENCE_MACHINE, entry)[0]

    form, chosen = min(candidates, key=estimate)
    if len(requests) > 1 or backend == "auto":
        able = ", ".join(f"{name} {entry.name}" for name, entry in candidates)
        log_once(
            logger,
            f"'auto' runs form={form} with core_attention_backend={chosen.name}",
            f"the least estimated time of {able}; refused: {'; '.join(refused) or 'none'}",
        )
    return form, chosen


def choose_batch_invariant(
    request: AttentionRequest, backend: str, key_blocks: int
) -> AttentionBackend:
    """The backend of the absorbed form that gives a token the same bits in every batch.

    Args:
        request: What it must be able to do, in the absorbed form.
        backend: ``"triton"``, ``"reference"``, or ``"auto"`` for the one of the device.
        key_blocks: Number of blocks that the keys come in.

    Raises:
        ValueError: If no backend can do that.
    """
    name = backend_for(backend, request.device)
    refused = {
        "it takes no attention_mask": request.masked,
        "it drops nothing (attention_dropout=0)": request.dropout,
        "keys must lie on one rank (no context parallelism)": key_blocks != 1,
        "core_attention_backend='reference' is batch-invariant on the CPU only": name == "reference"
        and request.device.type != "cpu",
    }
    reasons = [reason for reason, holds in refused.items() if holds]
    runnable: list[AttentionBackend] = [TiledReferenceBackend()]
    if name != "reference" and not reasons:
        runnable, refusals = ATTENTION_BACKENDS.examine(name, request)
        reasons = [f"{name}: {reason}" for reason in refusals.values()]
    if reasons:
        raise ValueError(f"batch_invariant=True cannot run here: {'; '.join(reasons)}")
    return runnable[0]
