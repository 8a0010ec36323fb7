"""Attention of new tokens over cached latents: absorbed or expanded, row by row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from absorbed_mla.batch_invariant.requirements import backend_for
from absorbed_mla.core_attention.attend import AttentionPlan, attend
from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest
from absorbed_mla.core_attention.cost import Work, machine_name, seconds
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.selection import choose
from absorbed_mla.dims import MLADims
from absorbed_mla.inference import backend as paged_backends
from absorbed_mla.inference.backend import PagedBackend, PagedRequest
from absorbed_mla.inference.chunked_context import ChunkedContext
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import InferenceStep, RowLengths
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import ATTENTION_BACKENDS

# Queries times heads in one call that keep the multiprocessors of a large GPU busy; and keys below
# which a call is too short.
_FULL = 2**15
_LEAST_CHUNK = 2**12


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows that run in one form.

    Attributes:
        form: ``"absorbed"`` or ``"expanded"``.
        rows: Of the step.
        tokens: Their new tokens on the token axis.
    """

    form: str
    rows: slice
    tokens: slice


class CachedAttention:
    """Attends over the latent cache, where no gradient is asked for.

    Rows with few new tokens (decode, speculative tokens) run absorbed over the paged latent. Rows
    with many run expanded: over their own tokens, and over the cached context in chunks, merged by
    LSE. The cost model draws the line, for each row by itself, so that no row is decompressed
    because of another.

    Args:
        dims: Dimensions of the layer on this rank.
        softmax_scale: Multiplies the scores.
        options: Form, backends and chunk sizes.
    """

    def __init__(self, dims: MLADims, softmax_scale: float, options: AbsorbedMLAOptions) -> None:
        self.dims = dims
        self.softmax_scale = softmax_scale
        self.options = options
        self.absorbed = AbsorbedForm()
        self.expanded = ExpandedForm(options.expansion_chunk_size)

    def __call__(
        self,
        step: InferenceStep,
        q: Tensor,
        kv: Tensor,
        weights: tuple[Tensor, Tensor],
        cos_sin: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend.

        Args:
            step: The cache, with the new tokens written.
            q: [q_nope | q_rope] [T, 1, N * (nope + rope)], not rotated; used up.
            kv: [latent | k_rope] of the new tokens [T, 1, C + rope].
            weights: W_UK [N, nope, C] and W_UV [N, v, C].
            cos_sin: Of the new tokens' positions, [T, rope / 2] each.

        Returns:
            [T, 1, N, v]; zeros for tokens that are no row's.
        """
        if not len(q):  # kernels are not launched over nothing
            return q.new_empty(0, 1, self.dims.num_heads_per_rank, self.dims.v_head_dim)
        parts = []
        for segment in self._segments(step, q):
            mine = segment.tokens
            attended = (self._absorbed if segment.form == "absorbed" else self._expanded)(
                step, segment, q[mine], kv[mine], weights, tuple(x[mine] for x in cos_sin)
            )
            parts.append(attended)
        return _joined(parts, q, self.dims)

    def _segments(self, step: InferenceStep, q: Tensor) -> tuple[Segment, ...]:
        whole = Segment("absorbed", slice(0, len(step.rows)), slice(0, len(q)))
        form = self.options.form
        if step.lengths is None:
            if form == "expanded":
                raise ValueError(
                    "form='expanded' cannot be captured in a CUDA graph: its work depends on the "
                    "lengths; use form='auto' or 'absorbed', or no graphs for prefill"
                )
            return (whole,)
        if form == "absorbed" or self.options.batch_invariant:
            return (whole,)
        if form == "expanded":
            return segments(step.lengths, _all_rows)
        if step.rows.max_query_length == 1:
            return (whole,)
        expanded = self._for_expanded(q)
        if expanded is None:
            return (whole,)
        expands = functools.partial(
            is_cheaper_expanded,
            self.dims,
            _Paged(self._paged(step, q).name),
            expanded,
            machine_name(q.device),
        )
        return segments(step.lengths, expands)

    def _paged(self, step: InferenceStep, q: Tensor) -> PagedBackend:
        request = PagedRequest(
            device=q.device,
            dtype=q.dtype,
            heads=self.dims.num_heads_per_rank,
            content=self.dims.kv_lora_rank,
            rope=self.dims.qk_rope_head_dim,
            block_size=step.block_size,
            batch_invariant=self.options.batch_invariant,
            windowed=step.windowed,
        )
        asked = self.options.paged_attention_backend
        if self.options.batch_invariant:  # the one that training attends with
            asked = backend_for(asked, q.device)
        return paged_backends.choose(asked, request)

    def _request(self, q: Tensor) -> AttentionRequest:
        key_width, value_width = self.expanded.widths(self.dims)
        return AttentionRequest(
            device=q.device,
            dtype=q.dtype,
            key_width=key_width,
            value_width=value_width,
            form="expanded",
            masked=False,
            dropout=False,
        )

    def _context_chunk(self, queries: int) -> int:
        """Tokens of context at a time: fewer where few queries need many heads to fill a GPU."""
        heads = min(self.dims.num_heads_per_rank, -(-_FULL // queries))
        shorter = max(self.options.expansion_chunk_size // heads, _LEAST_CHUNK)
        return min(self.options.context_chunk_size, shorter)

    def _for_expanded(self, q: Tensor) -> AttentionBackend | None:
        """The backend of the expanded form, or None where the one asked for does not do it."""
        asked, must = self.options.core_attention_backend, self.options.form == "expanded"
        return _expanded_backend(asked, self._request(q), self.dims, must)

    def _absorbed(self, step, segment, q, kv, weights, cos_sin) -> Tensor:
        w_uk, w_uv = weights
        q_content, q_rope = (x.squeeze(1) for x in self.absorbed.query(q, w_uk, *cos_sin))
        backend, total = self._paged(step, q), None
        for part in step.parts():
            rows = _rows_of(part.rows, segment, step.lengths)
            found = backend.forward(
                q_content,
                q_rope,
                part.cache,
                rows,
                self.softmax_scale,
                key_start=part.start,
                key_end=part.end,
                batch_invariant=self.options.batch_invariant,
            )
            total = found if total is None else merge(total[0].to(total[1].dtype), total[1], *found)
        assert total is not None, "a cache has a part"
        out = total[0].to(q.dtype)
        return self.absorbed.output(out.unsqueeze(1), w_uv)

    def _expanded(self, step, segment, q, kv, weights, cos_sin) -> Tensor:
        lengths = RowLengths(step.lengths.queries[segment.rows], step.lengths.keys[segment.rows])
        keys = ChunkedContext(
            lengths,
            segment.rows.start,
            step.parts,
            self._context_chunk(max(1, *lengths.queries)),
            self.options.context_chunk_size,
            step.windowed,
        )
        rules = ScoreRules(
            scale=self.softmax_scale, spans=(), query_chunk_size=self.options.query_chunk_size
        )
        backend = self._for_expanded(q)
        assert backend is not None
        plan = AttentionPlan(self.expanded, backend, keys, rules)
        query = self.expanded.query(q, weights[0], *cos_sin)
        out, _ = attend(plan, query, kv, self.expanded.weights(*weights))
        return out


def is_cheaper_expanded(
    dims: MLADims, absorbed, expanded, machine: str, lengths: tuple[int, int]
) -> bool:
    """Whether a row of so many (new tokens, keys) takes less time expanded than absorbed.

    Args:
        dims: Of the layer on this rank.
        absorbed: Backend of the absorbed form.
        expanded: Backend of the expanded form.
        machine: See ``cost.seconds``.
        lengths: Of the row.
    """
    queries, keys = lengths
    pairs = queries * keys - queries * (queries - 1) // 2
    work = Work(query_tokens=queries, key_tokens=keys, pairs=pairs, training=False)
    return seconds("expanded", expanded, dims, work, machine) < seconds(
        "absorbed", absorbed, dims, work, machine
    )


def segments(
    lengths: RowLengths, expands: Callable[[tuple[int, int]], bool]
) -> tuple[Segment, ...]:
    """Cut the rows into runs of one form.

    Args:
        lengths: Of all rows.
        expands: Whether a row of (new tokens, keys) runs expanded.
    """
    found: list[Segment] = []
    token = 0
    for row, (queries, keys) in enumerate(zip(lengths.queries, lengths.keys)):
        form = "expanded" if expands((queries, keys)) else "absorbed"
        first = Segment(form, slice(row, row), slice(token, token))
        if found and found[-1].form == form:
            first = found.pop()
        token += queries
        found.append(
            Segment(form, slice(first.rows.start, row + 1), slice(first.tokens.start, token))
        )
    return tuple(found)


def _all_rows(lengths: tuple[int, int]) -> bool:
    return True


def _rows_of(rows: Rows, segment: Segment, lengths: RowLengths | None) -> Rows:
    """The segment's rows, on its own token axis."""
    mine, first = segment.rows, segment.tokens.start
    if lengths is None or mine == slice(0, len(rows)):
        return rows
    starts = rows.query_starts[mine]
    return Rows(
        query_starts=starts - first if first else starts,
        query_lengths=rows.query_lengths[mine],
        kv_lengths=rows.kv_lengths[mine],
        block_table=rows.block_table[mine],
        max_query_length=max(lengths.queries[mine]),
        max_kv_length=max(lengths.keys[mine]),
    )


def _joined(parts: list[Tensor], q: Tensor, dims: MLADims) -> Tensor:
    """All tokens' outputs [T, 1, N, v]: the parts one after the other, then the host's padding."""
    missing = len(q) - sum(map(len, parts))
    if missing:
        parts = [*parts, q.new_zeros(missing, 1, dims.num_heads_per_rank, dims.v_head_dim)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _expanded_backend(
    asked: str, request: AttentionRequest, dims: MLADims, must: bool
) -> AttentionBackend | None:
    """The backend of the expanded form, or None where there is none and there need not be one."""
    if not must and not ATTENTION_BACKENDS.examine(asked, request)[0]:
        return None
    typical = Work(query_tokens=1024, key_tokens=8192, pairs=2**23, training=False)
    return choose({"expanded": request}, asked, dims, typical)[1]


class _Paged:
    def __init__(self, name):
        self.rates = {
            "hopper": {"NVIDIA H200": (640.0, 415.0)},
            "flash_mla": {"NVIDIA H200": (570.0, 570.0)},
            "triton": {"NVIDIA H200": (295.0, 170.0), "cpu": (1e-6, 1e-6)},
            "reference": {"NVIDIA H200": (15.0, 15.0), "gpu": (0.05, 0.05)},
        }[name]
