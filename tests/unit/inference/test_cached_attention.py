"""Attention over the latent cache: forms row by row, parts, chunks of context, workspace."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.dims import MLADims
from absorbed_mla.inference.attention import CachedAttention
from absorbed_mla.inference.cascade import CascadeTables
from absorbed_mla.inference.row_groups import (
    ChunkedContext,
    chunks,
    is_cheaper_expanded,
    segments,
)
from absorbed_mla.inference.step import RowLengths
from absorbed_mla.registry import ATTENTION_BACKENDS, PAGED_BACKENDS
from absorbed_mla.rope import apply_rope
from absorbed_mla.serving.scheduler.cascade_attention import PrefixGroup, tables_of
from tests.support.inference import PagedStep
from tests.support.memory import PeakMemory

DIMS = MLADims(
    hidden_size=32,
    num_heads=3,
    num_heads_per_rank=3,
    q_lora_rank=None,
    kv_lora_rank=16,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
)
DEEPSEEK = replace(
    DIMS,
    num_heads_per_rank=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
PAGED, EXPANDED = PAGED_BACKENDS["reference"], ATTENTION_BACKENDS["reference"]
SCALE = 0.3
# Decode, several new tokens, one without any, prefill after a context, prefill from nothing.
MIXED = RowLengths((1, 3, 0, 6, 5, 1), (9, 7, 4, 17, 5, 1))


def tensors(lengths: RowLengths, padding: int = 0, seed: int = 0) -> dict:
    """Random operands of a step; tokens in no row hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens, heads, width = sum(lengths.queries), DIMS.num_heads_per_rank, DIMS.kv_down_dim
    nan = torch.full((padding, 1, 1), torch.nan, dtype=torch.float64)
    made = {
        "q": random(tokens, 1, heads * DIMS.qk_head_dim),
        "kv": random(tokens, 1, width),
        "weights": (random(heads, 6, 16), random(heads, 5, 16), None),
        "cached": [random(k - q, width) for q, k in zip(lengths.queries, lengths.keys)],
    }
    positions = [p for q, k in zip(lengths.queries, lengths.keys) for p in range(k - q, k)]
    angles = torch.outer(torch.tensor(positions + [0] * padding).double(), torch.tensor([1.0, 0.1]))
    made["cos_sin"] = angles.cos().float(), angles.sin().float()
    for name in ("q", "kv"):
        x = made[name]
        made[name] = torch.cat((x, nan.expand(-1, -1, x.shape[-1])))
    return made


def attend(
    lengths: RowLengths,
    options: AbsorbedMLAOptions,
    made: dict,
    window: int | None = None,
    **step,
) -> torch.Tensor:
    step = PagedStep(lengths, made["cached"], **step)
    step.write(made["kv"])
    attention = CachedAttention(DIMS, SCALE, options, window)
    with torch.no_grad():
        return attention(step, made["q"].clone(), made["kv"], made["weights"], made["cos_sin"])


def naive(lengths: RowLengths, made: dict, window: int | None = None) -> torch.Tensor:
    """Row by row, keys and values written out."""
    w_uk, w_uv, _ = made["weights"]
    q = made["q"].unflatten(-1, (DIMS.num_heads_per_rank, -1))
    q = torch.cat((q[..., :6], apply_rope(q[..., 6:], *made["cos_sin"])), -1)[:, 0]
    outputs, token = [], 0
    for cached, new, total in zip(made["cached"], lengths.queries, lengths.keys):
        kv = torch.cat((cached, made["kv"][token : token + new, 0]))
        k = torch.einsum("kc,ndc->knd", kv[:, :16], w_uk)
        k = torch.cat((k, kv[:, None, 16:].expand(-1, len(w_uk), -1)), -1)
        v = torch.einsum("kc,nvc->knv", kv[:, :16], w_uv)
        scores = torch.einsum("qnd,knd->nqk", q[token : token + new], k) * SCALE
        hidden = torch.ones(new, total, dtype=torch.bool).triu(total - new + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(total - new - window)
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nqk,knv->qnv", probs, v))
        token += new
    return torch.cat(outputs)


class TestValues:
    @pytest.mark.parametrize("form", ["absorbed", "expanded", "auto"])
    @pytest.mark.parametrize("context_chunk_size", [1, 5, 1000])
    @pytest.mark.parametrize("step", [{}, {"block_size": 1}, {"block_size": 3, "part_keys": 6}])
    @pytest.mark.parametrize("window", [None, 1, 4])
    def test_mixed_rows(self, form, context_chunk_size, step, window):
        """Rows of every kind in one step; the host's padding holds NaN and comes out zero."""
        options = AbsorbedMLAOptions(form=form, context_chunk_size=context_chunk_size)
        made = tensors(MIXED, padding=4)
        out = attend(MIXED, options, made, window, **step)
        tokens = sum(MIXED.queries)
        expected = naive(MIXED, made, window)
        torch.testing.assert_close(out[:tokens, 0], expected, atol=1e-12, rtol=0)
        assert out[tokens:].eq(0).all()

    def test_both_forms_in_one_step(self, monkeypatch):
        """Whichever rows the cost model expands."""
        made, want = tensors(MIXED), naive(MIXED, tensors(MIXED))
        module = "absorbed_mla.inference.attention.is_cheaper_expanded"
        for chosen in itertools.product((False, True), repeat=3):
            answers = itertools.cycle(chosen)
            monkeypatch.setattr(module, lambda *_, answers=answers, **__: next(answers))
            out = attend(MIXED, AbsorbedMLAOptions(context_chunk_size=4), made)
            torch.testing.assert_close(out[:, 0], want, atol=1e-12, rtol=0)


class TestChoice:
    @pytest.mark.parametrize("keys", [8192, 131072])
    def test_crossover(self, keys):
        """By operations 1 / S_q - 1 / S_kv > 1 / 170.7: 171 new tokens over a long context."""

        def expands(queries):
            lengths = (queries, keys)
            return is_cheaper_expanded(DEEPSEEK, PAGED, EXPANDED, "cpu", lengths)

        first = next(n for n in range(1, 400) if expands(n))
        assert first == pytest.approx(1 / (1 / 170.7 + 1 / keys), abs=2)
        assert all(expands(n) for n in range(first, keys, 997))

    def test_segments(self):
        found = segments(RowLengths((1, 1, 300, 2, 500, 600), (9,) * 6), lambda row: row[0] > 100)
        assert [(s.form[0], s.rows, s.tokens) for s in found] == [
            ("a", slice(0, 2), slice(0, 2)),
            ("e", slice(2, 3), slice(2, 302)),
            ("a", slice(3, 4), slice(302, 304)),
            ("e", slice(4, 6), slice(304, 1404)),
        ]

    def test_decode_is_never_expanded_by_a_neighbour(self):
        lengths = RowLengths((1, 4096), (100_000, 100_000))
        expands = lambda row: is_cheaper_expanded(DEEPSEEK, PAGED, EXPANDED, "cpu", row)  # noqa: E731
        assert [s.form for s in segments(lengths, expands)] == ["absorbed", "expanded"]


class TestChunks:
    @settings(deadline=None, max_examples=60)
    @given(
        context=st.lists(st.integers(0, 9), max_size=5),
        bounds=st.tuples(st.integers(0, 9), st.none() | st.integers(0, 12)),
        size=st.integers(1, 7),
    )
    def test_every_key_once(self, context, bounds, size):
        start, end = bounds
        seen = []
        for ranges in chunks(tuple(context), start, end, size):
            assert ranges and len({each.row for each in ranges}) == len(ranges)
            assert sum(each.end - each.start for each in ranges) <= size
            seen += [(p.row, key) for p in ranges for key in range(p.start, p.end)]
        stop = 99 if end is None else end
        wanted = [(r, k) for r, n in enumerate(context) for k in range(start, min(n, stop))]
        assert seen == wanted


class TestBlocks:
    LENGTHS = RowLengths((8, 3), (28, 3))

    def source(self, most: int, windowed: bool = False) -> ChunkedContext:
        step = PagedStep(self.LENGTHS, tensors(self.LENGTHS)["cached"])
        step.write(tensors(self.LENGTHS)["kv"])
        return ChunkedContext(self.LENGTHS, 0, step.parts, 7, most, windowed)

    def test_keys_that_fit_are_one_block(self):
        """The new tokens among them, each row's aligned to its last key."""
        source = self.source(31)
        [block] = source.blocks(tensors(self.LENGTHS)["kv"], keep=False)
        assert source.num_blocks == 1 and len(block.kv) == 31
        assert block.spans == (Span(0, 8, 0, 28, 20), Span(8, 11, 28, 31, 0))

    @pytest.mark.parametrize(("most", "windowed"), [(30, False), (31, True)])
    def test_others_are_chunks(self, most, windowed):
        """Of what was cached: too many, or not all of them at hand together."""
        source = self.source(most, windowed)
        sizes = [len(b.kv) for b in source.blocks(tensors(self.LENGTHS)["kv"], keep=False)]
        assert source.num_blocks == 4 and sizes == [11, 7, 7, 6]

    @pytest.mark.parametrize(
        ("heads", "queries", "tokens"),
        [(128, 512, 2**14), (128, 2048, 2**16), (16, 512, 2**16), (128, 1, 2**13)],
    )
    def test_few_queries_take_many_heads_and_fewer_keys(self, heads, queries, tokens):
        """512 queries of 64 heads are 256 programs of 128 queries."""
        dims = replace(DIMS, num_heads=heads, num_heads_per_rank=heads)
        attention = CachedAttention(dims, SCALE, AbsorbedMLAOptions())
        assert attention._context_chunk(queries) == tokens


class TestWorkspace:
    """The expanded form holds a bounded part of the context, however long that is."""

    def peak(self, context: int, **options) -> int:
        lengths = RowLengths((8,), (context + 8,))
        made = tensors(lengths)
        step = PagedStep(lengths, [made["cached"][0][:0]], block_size=64)
        attention = CachedAttention(DIMS, SCALE, AbsorbedMLAOptions(form="expanded", **options))
        with torch.no_grad(), PeakMemory() as memory:
            out = attention(step, made["q"], made["kv"], made["weights"], made["cos_sin"])
        assert len(out) == 8
        return memory.peak

    def test_flat(self):
        """From 1k to 128k tokens of context."""
        peaks = [self.peak(n, context_chunk_size=512) for n in (1024, 8192, 131072)]
        assert max(peaks) < 1.05 * min(peaks)

    def test_grows_with_the_option(self):
        assert self.peak(8192, context_chunk_size=4096) > 3 * self.peak(
            8192, context_chunk_size=512
        )


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("groups", [{(0, 2): 3, (1, 3): 2}, {(0, 1): 2}])
def test_cascade(sink, groups):
    """Rows in two groups, out of order, or in one, and rows that share nothing; and padding."""
    lengths, found = RowLengths((3, 3, 3, 3, 3, 0), (19, 14, 17, 15, 9, 6)), []
    made = tensors(lengths, padding=2)
    made["weights"] = (
        *made["weights"][:2],
        torch.tensor([0.1, 2.0, -1.0]).double() if sink else None,
    )
    made = {**made, "q": made["q"].nan_to_num()}
    members = [PrefixGroup(np.array(rows), blocks) for rows, blocks in groups.items()]
    tables = CascadeTables(*tables_of(members, 5, 3, 17, 4))
    if len(groups) == 1:
        assert torch.equal(tables.order, tables.places)
        tables = tables._replace(order=None, places=None)
    for cascade in (None, tables):
        step = PagedStep(lengths, made["cached"])
        step.cascade, table = cascade, step.rows.block_table
        for rows, blocks in members:
            table[rows, :blocks] = table[rows[0], :blocks].clone()
        attention = CachedAttention(DIMS, SCALE, AbsorbedMLAOptions(form="absorbed"))
        step.write(made["kv"])
        operands = made["kv"], made["weights"], made["cos_sin"]
        found.append(attention(step, made["q"].clone(), *operands)[:15])
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-12)
