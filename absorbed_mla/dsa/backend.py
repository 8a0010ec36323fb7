"""Interfaces of the DSA backends: sparse attention over top-k keys, and the indexer's work.

An implementation is a file in ``dsa/backends`` (an entry of ``SPARSE_BACKENDS``) or in
``dsa/indexer_backends`` (``INDEXER_BACKENDS``). None of it uses autograd but the loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.dsa.index_vectors import IndexVectors
from absorbed_mla.dsa.key_subset import KeySubset
from absorbed_mla.inference.rows import Rows
from absorbed_mla.log_once import log_once
from absorbed_mla.registry import Registry

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SparseRequest:
    """What an implementation must be able to do for one call.

    Attributes:
        device: Of the tensors.
        dtype: Of the model.
        heads: Of the attention, on this tensor-parallel rank.
        kv_lora_rank: Width of the value, C.
        rope_dim: Width of the rotated part of a key, R.
        index_heads: Of the indexer, Hi.
        index_dim: Width of one, Di.
        topk: Keys of a query, at most; 0 where none are chosen, as in a warm-up.
        relu: Whether the indexer's products pass a ReLU.
        deterministic: Whether ``torch.use_deterministic_algorithms`` requires equal bits in every
            run.
        batch_invariant: Whether the result of a token must not depend on the rest of the batch.
        latent_cache_dtype: Of the keys, as in ``AbsorbedMLAOptions``; in training ``"model"``.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_lora_rank: int
    rope_dim: int
    index_heads: int
    index_dim: int
    topk: int
    relu: bool
    deterministic: bool
    batch_invariant: bool = False
    latent_cache_dtype: str = "model"


class SparseBackend(Protocol):
    """Attention over chosen keys. The contract is that of ``dsa/sparse_reference.py``.

    It serves training, prefill and decode. With few queries (decode) an implementation may divide
    the keys of each over programs and merge them; that is its own affair.

    An entry may have an attribute ``invariant``, its implementation for parity mode, with an
    attribute ``equals_dense``: whether over all keys it gives the bits of the dense attention in
    that mode. An entry without one refuses the mode.

    Attributes:
        name: As ``sparse_attention_backend`` names it; the name of the file.
        summary: What it is and what it needs.
        speed: On a GPU, relative to the reference's 1; ``"auto"`` takes the largest that can run.
            Below 1 for what gives another result or was not measured: only by name.
    """

    name: str
    summary: str
    speed: float

    def why_not(self, request: SparseRequest) -> str | None:
        """The reason why it cannot do what is requested here, or None."""
        ...

    def forward(self, inputs: AttentionInputs, chosen: Tensor, scale: float) -> AttentionOutput:
        """Output [S_q, B, N, C] in any dtype and LSE [S_q, B, N] in fp32 (fp64).

        Args:
            inputs: In the absorbed form; ``k_content`` and ``k_rope`` may be views of one tensor.
            chosen: int32 [S_q, B, topk] on the key axis, ascending, then -1.
            scale: Multiplies the scores.
        """
        ...

    def forward_cached(
        self,
        q_content: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        rows: Rows,
        chosen: Tensor,
        scale: float,
    ) -> AttentionOutput:
        """Output [T, N, C] in any dtype and LSE [T, N] in fp32 (fp64) of new tokens.

        Args:
            q_content: [T, N, C].
            q_rope: [T, N, R].
            cache: [blocks, block_size, C + R] with any strides of blocks and positions, or rows
                of ``Fp8Latents``, which are read in the dtype of the query; what was not chosen
                may hold anything.
            rows: Which tokens are whose, and where their keys are.
            chosen: Positions in the token's request, int32 [T, topk], ascending, then -1; a token
                in no row has none.
            scale: Multiplies the scores.
        """
        ...

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        chosen: Tensor,
        scale: float,
    ) -> AttentionInputs:
        """Gradients of the inputs; those of the keys in fp32 (fp64)."""
        ...


class IndexerBackend(Protocol):
    """The indexer's selection and loss; of ``invariant`` see ``SparseBackend``.

    Attributes:
        name: As ``indexer_backend`` names it; the name of the file.
        summary: What it is and what it needs.
        speed: As of ``SparseBackend``.
        gathers_keys: Whether the loss copies the rows of chosen keys, which a chunk must have room
            for; else for their scores alone.
    """

    name: str
    summary: str
    speed: float
    gathers_keys: bool

    def why_not(self, request: SparseRequest) -> str | None:
        """The reason why it cannot do what is requested here, or None."""
        ...

    def select(
        self,
        index: IndexVectors,
        spans: Spans,
        topk: int,
        *,
        relu: bool,
        tp_group: dist.ProcessGroup | None,
    ) -> Tensor:
        """A selection; see ``selection.select``."""
        ...

    def select_cached(
        self, query: Tensor, weights: Tensor, cache: Tensor, rows: Rows, topk: int, *, relu: bool
    ) -> Tensor:
        """Positions chosen for new tokens; see ``cached_selection.select_cached``."""
        ...

    def loss(
        self,
        index: IndexVectors,
        inputs: AttentionInputs,
        lse: Tensor | None,
        subsets: Iterable[KeySubset],
        *,
        attention_scale: float,
        factor: float,
        relu: bool,
        tp_group: dist.ProcessGroup | None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """The loss, with a gradient of ``index``; see ``indexer_loss.indexer_loss``."""
        ...


@dataclass(frozen=True, eq=False)
class TopKBackend:
    """An ``AttentionBackend`` of one call: attention over the keys of a selection.

    Attributes:
        sparse: The implementation.
        chosen: A selection, int32 [S_q, B, topk].
    """

    sparse: SparseBackend
    chosen: Tensor
    sinks = False

    def forward(self, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
        """See ``AttentionBackend``; of the rules only the scale is read."""
        return self.sparse.forward(inputs, self.chosen, rules.scale)

    def backward(
        self,
        grad: OutputGradient,
        output: AttentionOutput,
        inputs: AttentionInputs,
        rules: ScoreRules,
    ) -> AttentionInputs:
        """See ``AttentionBackend``."""
        return self.sparse.backward(grad, output, inputs, self.chosen, rules.scale)


def choose_implementation(registry: Registry, name: str, request: SparseRequest) -> Any:
    """The entry of that name, or for ``"auto"`` the fastest that can run.

    Raises:
        ValueError: If it cannot run what is requested, with the reason.
    """
    able, refused = registry.examine(name, request)
    if request.batch_invariant:
        unfit = {entry.name: _why_not_invariant(entry, request) for entry in able}
        refused |= {name: reason for name, reason in unfit.items() if reason is not None}
        able = [entry for entry in able if unfit[entry.name] is None]
    if not able:
        reasons = "; ".join(f"{entry}: {reason}" for entry, reason in refused.items())
        raise ValueError(f"{registry.option}={name!r} cannot run here: {reasons}")
    chosen = max(able, key=lambda entry: _speed(entry, request.device))
    log_once(_logger, f"{registry.option}: {chosen.name}")
    return chosen.invariant if request.batch_invariant else chosen


def _speed(entry: Any, device: torch.device) -> float:
    """Of an entry on a device: on a CPU kernels run in an interpreter, slower than anything."""
    if device.type == "cpu" and entry.name != "reference":
        return 0.0
    speed: float = entry.speed
    return speed


def _why_not_invariant(entry: Any, request: SparseRequest) -> str | None:
    """The reason why an entry cannot do in parity mode what it can do otherwise, or None."""
    invariant = getattr(entry, "invariant", None)
    if invariant is None:
        return "it is not batch-invariant (batch_invariant=True)"
    reason: str | None = invariant.why_not(request)
    return reason
