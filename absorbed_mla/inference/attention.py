"""Attention of new tokens over cached latents: absorbed or expanded, chosen for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.core_attention.attend import AttentionPlan, attend
from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest
from absorbed_mla.core_attention.cost import Work, machine_name
from absorbed_mla.core_attention.forms.absorbed import AbsorbedForm
from absorbed_mla.core_attention.forms.expanded import ExpandedForm
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Spans
from absorbed_mla.core_attention.merge import merge
from absorbed_mla.core_attention.selection import choose, invariant_name
from absorbed_mla.core_attention.sink import add_sink
from absorbed_mla.core_attention.window import WindowedBackend
from absorbed_mla.dims import MLADims
from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference import backend as paged
from absorbed_mla.inference.backend import PagedBackend, PagedRequest
from absorbed_mla.inference.decode_context_parallel.attention import DecodeContextParallelAttention
from absorbed_mla.inference.decode_context_parallel.support import require_shareable
from absorbed_mla.inference.full_prefill import OwnKeys, WholePrompts
from absorbed_mla.inference.paged_kernels import training_request
from absorbed_mla.inference.prefill_context_parallel import TokenShares
from absorbed_mla.inference.row_groups import (
    ALL_ABSORBED,
    ChunkedContext,
    Segment,
    is_cheaper_expanded,
    rows_of,
    segments,
)
from absorbed_mla.inference.rows import Rows
from absorbed_mla.inference.step import InferenceStep, LatentCache, RowLengths, choose_cache
from absorbed_mla.inference.window import BLOCK_SIZE, WindowedPagedBackend
from absorbed_mla.options import AbsorbedMLAOptions
from absorbed_mla.registry import ATTENTION_BACKENDS
from absorbed_mla.rope import RotaryTable

# Queries times heads of one call that keep all multiprocessors of a large GPU busy.
_BUSY_QUERY_HEADS = 2**15
# Calls over fewer keys are dominated by their launch.
_MIN_CHUNK_KEYS = 2**12
# The call that the backend of the expanded form is chosen for.
_TYPICAL_PREFILL = Work(query_tokens=1024, key_tokens=8192, pairs=2**23, training=False)


class CachedAttention:
    """Attends over the latent cache, without gradients.

    Rows with few new tokens (decode, speculative tokens) run absorbed over the paged latent. Rows
    with many run expanded: over their own tokens, and over the cached context in chunks, merged by
    LSE. The cost model decides for each row by itself, so that no row is decompressed because of
    another. In a CUDA graph only whole prompts may run expanded (``full_prefill.py``).

    Backends and the kind of cache are chosen when they are first needed, and kept until something
    else is requested.

    Args:
        dims: Dimensions of the layer on this rank.
        softmax_scale: Multiplies the scores.
        options: Form, backends and chunk sizes.
        window: Keys that a token sees, itself included; None for all before it.

    Attributes:
        fp8: Makes the rows of the cache; None if they are latents as the model computed them.
    """

    def __init__(
        self,
        dims: MLADims,
        softmax_scale: float,
        options: AbsorbedMLAOptions,
        window: int | None = None,
    ) -> None:
        self.dims = dims
        self.softmax_scale = softmax_scale
        self.options = options
        self.window = window
        widths = dims.kv_lora_rank, dims.qk_rope_head_dim
        self.fp8 = Fp8Latents.of(options.latent_cache_dtype, *widths)
        self.absorbed = AbsorbedForm()
        self.expanded = ExpandedForm(options.expansion_chunk_size)
        self._cache_choice: tuple[type, LatentCache] | None = None
        self._paged_choice: tuple[PagedRequest, PagedBackend] | None = None
        self._expanded_choice: tuple[AttentionRequest, AttentionBackend | None] | None = None

    def open_step(
        self, context: Any, layer_number: int, layer_offset: Callable[[], int], kv: Tensor
    ) -> InferenceStep:
        """The cache of the layer in ``context`` for one forward; see ``LatentCache.open``."""
        if self._cache_choice is None or self._cache_choice[0] is not type(context):
            self._cache_choice = type(context), choose_cache(context)
        cache = self._cache_choice[1]
        rows = kv if self.fp8 is None else self.fp8.like(kv)
        step = cache.open(context, layer_number, layer_offset, rows, self.options, owner=self)
        if step.ranks is not None:
            require_shareable(self.options, self.window)
        return step

    def rows(self, kv: Tensor) -> Tensor:
        """What a step writes of [latent | k_rope] [T, 1, C + R]."""
        return kv if self.fp8 is None else self.fp8.encode(kv)

    def rounded(self, kv: Tensor) -> Tensor:
        """[latent | k_rope] as read from the cache, with the gradient of ``kv``."""
        return kv if self.fp8 is None else self.fp8.rounded(kv)

    def cos_sin(
        self, step: InferenceStep, rotary: RotaryTable, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Of the new tokens' positions, [T, R / 2] each; read once for all layers of a forward."""

        def make() -> tuple[Tensor, Tensor]:
            return rotary.rows(step.max_position, step.positions(), device)

        return step.tables.get(("cos_sin", rotary.parameters, device), make)

    def __call__(
        self,
        step: InferenceStep,
        q: Tensor,
        kv: Tensor,
        weights: tuple[Tensor, Tensor, Tensor | None],
        cos_sin: tuple[Tensor, Tensor],
        over: PagedBackend | None = None,
    ) -> Tensor:
        """Attention of the new tokens over all keys of their rows, or over some of them.

        Args:
            step: The cache, with the new tokens written.
            q: [q_nope | q_rope] [T, 1, N * (nope + R)], not rotated; overwritten. Where ranks
                divide the new tokens, of this rank's.
            kv: [latent | k_rope] of the new tokens [T, 1, C + R].
            weights: W_UK [N, nope, C], W_UV [N, v, C] and the sink [N], or None.
            cos_sin: Of the new tokens' positions, [T, R / 2] each.
            over: The backend of this call alone, which attends to the keys chosen for each token;
                all rows then run absorbed. None: all keys.

        Returns:
            [T, 1, N, v] of the tokens of ``q``; zeros for those that are in no row.
        """
        if not len(q):  # kernels cannot be launched for nothing
            return q.new_empty(0, 1, self.dims.num_heads_per_rank, self.dims.v_head_dim)
        if step.shares is not None:
            return self._divided(step, step.shares, q, kv, weights, cos_sin)
        if over is None and step.whole_prompts is not None and self.window is None:
            return self._apart(step, step.whole_prompts, q, kv, weights, cos_sin)
        outputs = []
        for segment in self._segments(step, q) if over is None else (ALL_ABSORBED,):
            run = partial(self._absorbed, over) if segment.form == "absorbed" else self._expanded
            tokens = segment.tokens
            cos, sin = cos_sin
            outputs.append(
                run(step, segment, q[tokens], kv[tokens], weights, (cos[tokens], sin[tokens]))
            )
        return _joined(outputs, q, self.dims)

    def expands_in_graphs(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a step in a CUDA graph may have ``whole_prompts``, which attend expanded."""
        if self.options.form != "auto" or self.options.batch_invariant:
            return False
        return self._backend_in_graphs(device, dtype) is not None

    def _apart(
        self,
        step: InferenceStep,
        prompts: WholePrompts,
        q: Tensor,
        kv: Tensor,
        weights: tuple[Tensor, Tensor, Tensor | None],
        cos_sin: tuple[Tensor, Tensor],
    ) -> Tensor:
        """:meth:`__call__` where whole prompts attend expanded, and all other rows absorbed."""
        first = slice(prompts.tokens)
        cos, sin = cos_sin
        # Either form makes its query in place.
        decoding = q[first].clone(), kv[first], weights, (cos[first], sin[first])
        decoded = self._absorbed(None, step, ALL_ABSORBED, *decoding, rows=prompts.decoding)
        backend = self._backend_in_graphs(q.device, q.dtype)
        keys, own = OwnKeys(prompts.spans), self.rounded(kv)
        out = self._attend_expanded(keys, q, own, weights, cos_sin, backend)
        # Zeros where there is no token of the other kind.
        out[first] += decoded
        return out

    def _divided(
        self,
        step: InferenceStep,
        shares: TokenShares,
        q: Tensor,
        kv: Tensor,
        weights: tuple[Tensor, Tensor, Tensor | None],
        cos_sin: tuple[Tensor, Tensor],
    ) -> Tensor:
        """:meth:`__call__` where ranks divide the new tokens.

        Rows that run expanded are divided by queries. Those that run absorbed are divided by keys
        already, each rank's own: for these, all ranks need all queries.
        """
        out = q.new_zeros(len(q), 1, self.dims.num_heads_per_rank, self.dims.v_head_dim)
        all_queries = None
        for segment in self._segments(step, q):
            tokens = slice(*segment.tokens.indices(len(kv))[:2])
            runs = shares.within(tokens)
            more = kv[tokens], weights, (cos_sin[0][tokens], cos_sin[1][tokens])
            if segment.form == "absorbed":
                all_queries = shares.gather(q) if all_queries is None else all_queries
                of_all = self._absorbed(None, step, segment, all_queries[tokens], *more)
                found = [of_all[there] for there, _ in runs]
            else:
                found = self._expanded_runs(step, segment, runs, q, *more)
            for (_, here), part in zip(runs, found, strict=True):
                out[here] = part
        return out

    def _expanded_runs(self, step, segment, runs, q, kv, weights, cos_sin) -> Sequence[Tensor]:
        """Of some tokens of a segment; collective also without any, as chunks of keys are."""
        there = [run for run, _ in runs]
        keys = self._keys(step, segment, there)
        if not runs:
            for _ in keys.blocks(kv, keep=False):
                pass
            return []
        q = torch.cat([q[here] for _, here in runs])
        cos, sin = (torch.cat([x[run] for run in there]) for x in cos_sin)
        found = self._attend_expanded(keys, q, kv, weights, (cos, sin))
        return found.split([run.stop - run.start for run in there])

    def _segments(self, step: InferenceStep, q: Tensor) -> tuple[Segment, ...]:
        form = self.options.form
        if step.cascade is not None:
            return (ALL_ABSORBED,)
        if step.lengths is None:
            if form == "expanded":
                raise ValueError(
                    "form='expanded' cannot be captured in a CUDA graph: its work depends on the "
                    "lengths; use form='auto' or 'absorbed', or no graphs for prefill"
                )
            return (ALL_ABSORBED,)
        if form == "absorbed" or self.options.batch_invariant:
            return (ALL_ABSORBED,)
        if form == "expanded":
            make = partial(segments, step.lengths, lambda lengths: True)
            return step.tables.get("segments, all expanded", make)
        if step.rows.max_query_length == 1:
            return (ALL_ABSORBED,)
        expanded = self._expanded_backend(q.device, q.dtype)
        if expanded is None:
            return (ALL_ABSORBED,)
        costs = self.dims, self._paged_backend(step, q), expanded, machine_name(q.device)
        make = partial(
            segments, step.lengths, partial(is_cheaper_expanded, *costs, window=self.window)
        )
        return step.tables.get(("segments", *costs, self.window), make)

    def _paged_backend(self, step: InferenceStep, q: Tensor) -> PagedBackend:
        """The backend of the absorbed form."""
        request = PagedRequest(
            device=q.device,
            dtype=q.dtype,
            num_heads=self.dims.num_heads_per_rank * (step.ranks.parts if step.ranks else 1),
            kv_lora_rank=self.dims.kv_lora_rank,
            qk_rope_head_dim=self.dims.qk_rope_head_dim,
            block_size=step.block_size if self.window is None else BLOCK_SIZE,
            batch_invariant=self.options.batch_invariant,
            windowed=step.windowed and self.window is None,
            latent_cache_dtype=self.options.latent_cache_dtype,
        )
        if self._paged_choice is None or self._paged_choice[0] != request:
            name = self.options.paged_attention_backend
            if self.options.batch_invariant:  # the backend of training
                name = invariant_name(self.options, training_request(request))
            self._paged_choice = request, paged.choose(name, request)
        return self._paged_choice[1]

    def _backend_in_graphs(
        self, device: torch.device, dtype: torch.dtype
    ) -> AttentionBackend | None:
        """That of the expanded form over ``DeviceSpans``; None where none can run."""
        request = self._expanded_request(device, dtype)
        able, _ = ATTENTION_BACKENDS.examine(self.options.core_attention_backend, request)
        return next((backend for backend in able if backend.reads_device_spans), None)

    def _expanded_request(self, device: torch.device, dtype: torch.dtype) -> AttentionRequest:
        key_width, value_width = self.expanded.widths(self.dims)
        return AttentionRequest(
            form="expanded",
            device=device,
            dtype=dtype,
            key_width=key_width,
            value_width=value_width,
            masked=False,
            dropout=False,
        )

    def _expanded_backend(
        self, device: torch.device, dtype: torch.dtype
    ) -> AttentionBackend | None:
        """The backend of the expanded form; None where ``form="auto"`` and none can run."""
        request = self._expanded_request(device, dtype)
        if self._expanded_choice is None or self._expanded_choice[0] != request:
            name, backend = self.options.core_attention_backend, None
            if self.options.form == "expanded" or ATTENTION_BACKENDS.examine(name, request)[0]:
                _, backend = choose({"expanded": request}, name, self.dims, _TYPICAL_PREFILL)
            self._expanded_choice = request, backend
        return self._expanded_choice[1]

    def _context_chunk(self, queries: int) -> int:
        """Tokens of context at a time: fewer where few queries need many heads to fill a GPU."""
        heads = min(self.dims.num_heads_per_rank, -(-_BUSY_QUERY_HEADS // queries))
        shorter = max(self.options.expansion_chunk_size // heads, _MIN_CHUNK_KEYS)
        return min(self.options.context_chunk_size, shorter)

    def _absorbed(self, over, step, segment, q, kv, weights, cos_sin, rows=None) -> Tensor:
        """Of a segment; ``rows`` are others with the same tokens, of a cache in one part."""
        w_uk, w_uv, sink = weights
        query = self.absorbed.query_in_inference(q, w_uk, *cos_sin)
        q_content, q_rope = (x.squeeze(1) for x in query)
        backend, total = over or self._paged_backend(step, q), None
        cascade = step.cascade if over is None and rows is None else None
        if cascade is not None:
            [_] = step.parts()  # the engine refuses it with others
            rows = step.tables.get("cascade", partial(cascade.rows, step.rows, step.block_size))
            q_content, q_rope = cascade.by_place(q_content), cascade.by_place(q_rope)
        if self.window is not None:
            backend = WindowedPagedBackend(backend, self.window)
        if step.ranks is not None:
            backend = DecodeContextParallelAttention(backend, step.ranks)
        for part in step.parts():
            of_part = part.rows if rows is None else rows
            if segment is not ALL_ABSORBED:
                of_part = self._rows_of(step, of_part, segment)
            attended = backend.forward(
                q_content,
                q_rope,
                part.cache,
                of_part,
                self.softmax_scale,
                key_start=part.start,
                key_end=part.end,
                batch_invariant=self.options.batch_invariant,
            )
            if total is None:
                total = attended
            else:
                out, lse = total
                total = merge(out.to(lse.dtype), lse, *attended)
        assert total is not None, "a cache has a part"
        out = (total if sink is None else add_sink(*total, sink))[0].to(q.dtype)
        out = self.absorbed.output_in_inference(out.unsqueeze(1), w_uv)
        return out if cascade is None else cascade.by_token(out)

    def _rows_of(self, step: InferenceStep, rows: Rows, segment: Segment) -> Rows:
        """A segment's rows; once for all layers, unless a part of the cache has its own table."""
        make = partial(rows_of, rows, segment, step.lengths)
        chosen = segment.rows
        if rows is not step.rows:
            return make()
        return step.tables.get(("rows", chosen.start, chosen.stop), make)

    def _expanded(self, step, segment, q, kv, weights, cos_sin) -> Tensor:
        return self._attend_expanded(self._keys(step, segment), q, kv, weights, cos_sin)

    def _keys(
        self, step: InferenceStep, segment: Segment, runs: Sequence[slice] | None = None
    ) -> ChunkedContext:
        """Keys of a segment that runs expanded, for all of its new tokens or some runs of them."""
        assert step.lengths is not None
        lengths = RowLengths(step.lengths.queries[segment.rows], step.lengths.keys[segment.rows])
        return ChunkedContext(
            lengths,
            segment.rows.start,
            step.parts,
            self._context_chunk(max(1, *lengths.queries)),
            self.options.context_chunk_size,
            step.windowed,
            self.fp8,
            runs,
            step.tables,
            self.window,
        )

    def _attend_expanded(self, keys, q, kv, weights, cos_sin, backend=None) -> Tensor:
        rules = ScoreRules(
            scale=self.softmax_scale, spans=Spans(), query_chunk_size=self.options.query_chunk_size
        )
        backend = backend or self._expanded_backend(q.device, q.dtype)
        assert backend is not None
        if self.window is not None:
            backend = WindowedBackend(backend, self.window)
        plan = AttentionPlan(self.expanded, backend, keys, rules)
        query = self.expanded.query(q, weights[0], *cos_sin)
        *projections, sink = weights
        out, _ = attend(plan, query, kv, self.expanded.weights(*projections), sink)
        return out


def _joined(outputs: list[Tensor], q: Tensor, dims: MLADims) -> Tensor:
    """Outputs of all tokens [T, 1, N, v]: the segments', then zeros for Megatron's padding."""
    missing = len(q) - sum(map(len, outputs))
    if missing:
        padding = q.new_zeros(missing, 1, dims.num_heads_per_rank, dims.v_head_dim)
        outputs = [*outputs, padding]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
