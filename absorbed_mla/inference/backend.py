"""Backends for absorbed attention over a paged latent cache: interface, request and choice.

The backends themselves are the files in ``inference/backends``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.core_attention.cost import machine_name, speed
from absorbed_mla.inference.rows import Rows
from absorbed_mla.log_once import log_once
from absorbed_mla.registry import PAGED_BACKENDS

Rates = Mapping[str, tuple[float, float]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PagedRequest:
    """What a backend must be able to do for the calls of one layer.

    Attributes:
        device: Of query and cache.
        dtype: Of the query, and of the cache unless ``latent_cache_dtype`` says otherwise.
        num_heads: N, heads of one rank.
        kv_lora_rank: C.
        qk_rope_head_dim: R, may be 0.
        block_size: Tokens in a block of the cache.
        batch_invariant: Whether the result of a token must not depend on the rest of the batch.
        windowed: Whether calls may be for a part of the keys (``key_start``, ``key_end``).
        latent_cache_dtype: As in ``AbsorbedMLAOptions``.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_size: int
    batch_invariant: bool = False
    windowed: bool = False
    latent_cache_dtype: str = "model"


class PagedBackend(Protocol):
    """Absorbed attention over a paged cache: an entry of the registry ``PAGED_BACKENDS``.

    Attributes:
        name: As in the option ``paged_attention_backend``; the name of its file.
        summary: What it is and what it needs, one phrase.
        forms: ``("absorbed",)``.
        rates: Measured (forward, backward) TFLOP/s in bf16 by name of the GPU. The names "cpu" and
            "gpu" stand for machines on which it was not measured.
    """

    name: str
    summary: str
    forms: tuple[str, ...]
    rates: Rates

    def why_not(self, request: PagedRequest) -> str | None:
        """Why it cannot do what is requested, or None."""

    def forward(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        scale: float,
        key_start: int = 0,
        key_end: int | None = None,
        batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Output [T, N, C] and LSE [T, N]; see ``backends.reference.paged_reference``."""


def choose(name: str, request: PagedRequest) -> PagedBackend:
    """The fastest backend that can do what is requested, by measured rate.

    Args:
        name: The only backend that may run, or ``"auto"``, which logs once what it chose.

    Raises:
        ValueError: If there is no backend of that name, or none can run here.
    """
    runnable, refused = PAGED_BACKENDS.examine(name, request)
    reasons = "; ".join(f"{each}: {reason}" for each, reason in refused.items())
    if not runnable:
        raise ValueError(f"paged_attention_backend={name!r} cannot run here: {reasons}")
    machine = machine_name(request.device)
    fastest = max(runnable, key=lambda backend: speed(machine, backend))
    if name == "auto":
        log_once(
            logger,
            f"'auto' runs paged_attention_backend={fastest.name}",
            f"the fastest that can; refused: {reasons or 'none'}",
        )
    return fastest
