"""Which form runs on which backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from absorbed_mla.batch_invariant.requirements import backend_for
from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest, examine
from absorbed_mla.core_attention.cost import Work, machine_name, seconds
from absorbed_mla.core_attention.kept import kept_on_gpu
from absorbed_mla.core_attention.tiled_reference import TiledReferenceBackend
from absorbed_mla.dims import MLADims

logger = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()


def choose(
    requests: Mapping[str, AttentionRequest], backend: str, dims: MLADims, work: Work
) -> tuple[str, AttentionBackend]:
    """The form and the backend that take the least time by the cost model.

    Args:
        requests: What a backend must be able to do, for every form that may run.
        backend: The only backend that may run, or ``"auto"``.
        dims: Of the layer.
        work: What one rank has to do.

    Raises:
        ValueError: If there is no such backend, or it can run none of the forms.
    """
    return _cheapest(tuple(requests.items()), backend, dims, work)


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
        runnable, refusals = examine(name, request)
        reasons = [f"{name}: {reason}" for reason in refusals.values()]
    if reasons:
        raise ValueError(f"batch_invariant=True cannot run here: {'; '.join(reasons)}")
    return runnable[0]


@kept_on_gpu(256, lambda requests, *_: requests[0][1].device)
def _cheapest(
    requests: tuple[tuple[str, AttentionRequest], ...], backend: str, dims: MLADims, work: Work
) -> tuple[str, AttentionBackend]:
    candidates, refused = [], []
    for form, request in requests:
        runnable, reasons = examine(backend, request)
        candidates += [(form, found) for found in runnable]
        refused += [f"{name} ({form}): {reason}" for name, reason in reasons.items()]
    if not candidates:
        raise ValueError(
            f"core_attention_backend={backend!r} cannot run here: {'; '.join(refused)}"
        )
    machine = machine_name(requests[0][1].device)
    form, found = min(candidates, key=lambda way: seconds(way[0], way[1].name, dims, work, machine))
    if (len(requests) > 1 or backend == "auto") and (form, found.name) not in _logged:
        _logged.add((form, found.name))
        logger.info(
            "'auto' runs form=%s with core_attention_backend=%s: the least estimated time of %s, "
            "here for %d queries, %d keys, %s; refused: %s",
            form,
            found.name,
            ", ".join(f"{name} {each.name}" for name, each in candidates),
            work.query_tokens,
            work.key_tokens,
            "training" if work.training else "evaluation",
            "; ".join(refused) or "none",
        )
    return form, found
