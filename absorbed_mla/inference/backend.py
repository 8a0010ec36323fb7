"""Which implementation attends over the paged latent cache, and why another one cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionRequest
from absorbed_mla.core_attention.backends.hopper import ENTRY as HOPPER
from absorbed_mla.core_attention.backends.triton import ENTRY as TRITON
from absorbed_mla.inference.backends import flash_mla
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from absorbed_mla.kernels import operators

logger = logging.getLogger(__name__)
_logged: set[str] = set()
# Tokens of a block of the cache that the kernel for Hopper loads at a time, at least.
_HOPPER_PAGE = 16


class PagedBackend(Protocol):
    """Absorbed attention over a paged cache; the contract is that of :func:`paged_reference`."""

    name: str

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
        """Output [T, N, C] and LSE [T, N]."""
        ...


@dataclass(frozen=True)
class PagedRequest:
    """What a backend must be able to do for the calls of one layer.

    Attributes:
        device: Where.
        dtype: Of query and cache.
        heads: N, of one rank.
        content: C, width of the latent.
        rope: R, width of k_rope.
        block_size: Tokens in a block of the cache.
        batch_invariant: Whether the result of a token must not depend on the rest of the batch.
        windowed: Whether calls may be for a part of the keys (``key_start``, ``key_end``).
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    content: int
    rope: int
    block_size: int
    batch_invariant: bool = False
    windowed: bool = False


class ReferenceBackend:
    """Plain PyTorch, any device and dtype; batch-invariant."""

    name = "reference"
    forward = staticmethod(paged_reference)


class KernelBackend:
    """This package's own kernels; with ``batch_invariant`` in the arithmetic of training.

    Args:
        name: ``"triton"`` for the portable ones, ``"hopper"`` for those of compute capability 9.0.
    """

    def __init__(self, name: str) -> None:
        self.name = name

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
        """See :func:`paged_reference`; the LSE is in fp32."""
        return operators.paged_attention_forward(
            q_content,
            q_rope,
            cache,
            rows.query_starts,
            rows.query_lengths,
            rows.kv_lengths,
            rows.block_table,
            rows.max_query_length,
            rows.max_kv_length,
            scale,
            key_start,
            key_end,
            batch_invariant,
            kernel=self.name,
        )


def _triton_refuses(request: PagedRequest) -> str | None:
    """Why the portable kernels cannot do this, or None: as in training."""
    return TRITON.why_not(_training_request(request))


def _hopper_refuses(request: PagedRequest) -> str | None:
    """Why the kernel for Hopper cannot do this, or None: as in training, but for the blocks."""
    if request.device.type == "cuda" and request.block_size % _HOPPER_PAGE:
        return (
            f"it needs a block size that is a multiple of {_HOPPER_PAGE}; the cache has "
            f"{request.block_size}"
        )
    return HOPPER.why_not(_training_request(request))


def _training_request(request: PagedRequest) -> AttentionRequest:
    return AttentionRequest(
        device=request.device,
        dtype=request.dtype,
        key_width=request.content + request.rope,
        value_width=request.content,
        form="absorbed",
        masked=False,
        dropout=False,
    )


Refuses = Callable[[PagedRequest], "str | None"]

# The fastest first; each with the reason why it cannot run, or None.
_BACKENDS: dict[str, tuple[PagedBackend, Refuses]] = {
    "hopper": (KernelBackend("hopper"), _hopper_refuses),
    "flash_mla": (flash_mla.FlashMLABackend(), flash_mla.refuses),
    "triton": (KernelBackend("triton"), _triton_refuses),
    "reference": (ReferenceBackend(), lambda request: None),
}


def examine(name: str, request: PagedRequest) -> tuple[list[PagedBackend], dict[str, str]]:
    """The backends that can do this, and why the others cannot, by name.

    Args:
        name: The only one to examine, or ``"auto"`` for all.
        request: What must be done.

    Raises:
        ValueError: If there is no backend of that name.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ValueError(
            f"paged_attention_backend must be one of auto, {', '.join(_BACKENDS)}; got {name!r}"
        )
    runnable, refused = [], {}
    for each in _BACKENDS if name == "auto" else (name,):
        backend, refuses = _BACKENDS[each]
        reason = refuses(request)
        if reason is None:
            runnable.append(backend)
        else:
            refused[each] = reason
    return runnable, refused


def choose(name: str, request: PagedRequest) -> PagedBackend:
    """The first backend that can do this.

    Args:
        name: The only one that may, or ``"auto"``, which says once what it took.
        request: What must be done.

    Raises:
        ValueError: If there is no such backend, or none can run here.
    """
    runnable, refused = examine(name, request)
    reasons = "; ".join(f"{each}: {reason}" for each, reason in refused.items())
    if not runnable:
        raise ValueError(f"paged_attention_backend={name!r} cannot run here: {reasons}")
    found = runnable[0]
    if name == "auto" and found.name not in _logged:
        _logged.add(found.name)
        logger.info(
            "'auto' runs paged_attention_backend=%s; refused: %s", found.name, reasons or "none"
        )
    return found
