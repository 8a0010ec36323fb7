"""Calls of attention with keys and values of every head, and what they must give."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.masks.tiles import query_tiles
from tests.support.hostile import amid_nan, in_no_span, poisoned_memory, visible_pairs
from tests.support.numerics import relative_error

# Queries of a tile.
_TOKENS = 128
# Half of the rows of a warp: a thread has a row of each half.
_ROWS_OF_A_GROWTH = 8
_SINKS = 0.7, 40.0, -40.0


@dataclass(frozen=True)
class MultiHeadCase:
    """One call; ``width`` is that of queries and keys, and what is in no span holds NaN.

    ``growth`` is how much scores grow from 128 keys to the next, as exponents of 2: of queries
    0 .. 7, of queries 8 .. 15, .., from the beginning again when there are more queries.
    ``window`` is how many keys a query sees at most, if not None. With ``sink``, heads have sinks
    among, far above and far below the scores.
    """

    queries: int
    keys: int
    spans: tuple[Span, ...]
    heads: int = 2
    batch: int = 1
    width: int = 192
    values: int = 128
    dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0
    growth: tuple[float, ...] = ()
    window: int | None = None
    sink: bool = False

    def operands(self, device: torch.device) -> list[Tensor]:
        """Random q, k and v amid NaN; tokens in no span are NaN, too."""
        torch.manual_seed(self.queries)
        found = []
        for length, width, size in (
            (self.queries, self.width, self.magnitude),
            (self.keys, self.width, self.magnitude),
            (self.keys, self.values, 1.0),
        ):
            x = torch.randn(length, self.batch, self.heads, width, device=device)
            found.append((x * size).to(self.dtype))
        if self.growth:
            rows = torch.arange(self.queries, device=device) // _ROWS_OF_A_GROWTH
            growth = torch.tensor(self.growth, device=device)[rows % len(self.growth)]
            found[0][..., 0] = (growth * math.log(2) * self.width**0.5)[:, None, None]
            found[1][..., 0] = (torch.arange(self.keys, device=device) // 128)[:, None, None]
        no_query, no_key = in_no_span(self.spans, self.queries, self.keys)
        for x, rows in zip(found, (no_query, no_key, no_key)):
            x[rows.to(device)] = torch.nan
        return [amid_nan(x) for x in found]

    def check_rows(
        self, forward: Callable[..., tuple[Tensor, Tensor]], device: torch.device
    ) -> None:
        """The bits of a query are the same when the scores of all others grow otherwise."""
        q, k, v = self.operands(device)
        tiles = query_tiles(self.spans, _TOKENS, self.queries).to(device)
        out, lse = forward(q, k, v, tiles, self.width**-0.5)
        for kept in range(0, self.queries, _ROWS_OF_A_GROWTH + 1):
            for growth in (0.0, -30.0, 30.0):
                other = torch.full_like(q, growth)
                other[kept] = q[kept]
                found = forward(other, k, v, tiles, self.width**-0.5)
                assert torch.equal(found[0][kept], out[kept]), f"query {kept}, {growth}"
                assert torch.equal(found[1][kept], lse[kept]), f"query {kept}, {growth}"

    def check(self, forward: Callable[..., tuple[Tensor, Tensor]], device: torch.device) -> None:
        """Compare what ``kernels/hopper/multi_head.py`` gives with the definition."""
        q, k, v = self.operands(device)
        scale, window = self.width**-0.5, self.window
        tiles = query_tiles(self.spans, _TOKENS, self.queries, window).to(device)
        largest = torch.full(q.shape[:3], torch.nan, device=device)
        sink = None
        if self.sink:
            logits = torch.tensor(_SINKS, device=device, dtype=self.dtype)
            sink = logits.repeat(self.heads)[: self.heads]
        with poisoned_memory():
            out, lse = forward(q, k, v, tiles, scale, largest, window, sink)
        with poisoned_memory():
            again = forward(q, k, v, tiles, scale, None, window, sink)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse), "recording changes bits"
        visible = visible_pairs(self.spans, self.queries, self.keys, window)
        visible = visible.to(device)[:, None, None]
        blind = ~visible.any(-1).expand(lse.shape)
        double = [x.double().nan_to_num() for x in (q, k, v)]
        scores = torch.einsum("qbnd,kbnd->qbnk", *double[:2]) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        expected_lse = scores.logsumexp(-1)
        if sink is not None:
            expected_lse = expected_lse.logaddexp(sink.double())
        probs = (scores - expected_lse[..., None]).exp().masked_fill(~visible, 0.0).nan_to_num()
        expected = torch.einsum("qbnk,kbnv->qbnv", probs, double[2])
        plain = torch.einsum("qbnk,kbnv->qbnv", probs.to(self.dtype).double(), double[2])
        assert (out[blind] == 0).all()
        if sink is None:
            assert (lse[blind] == -torch.inf).all()
        else:
            torch.testing.assert_close(lse[blind].double(), expected_lse[blind])
        assert torch.isfinite(out).all() and torch.isfinite(lse[~blind]).all()
        if not self.keys:
            assert blind.all() and (largest == -torch.inf).all()
            return
        top = scores.amax(-1)
        assert (largest[blind] == -torch.inf).all()
        if blind.all():
            return
        assert relative_error(largest[~blind], top[~blind]) < 1e-5
        assert relative_error(lse[~blind], expected_lse[~blind]) < 1e-5
        error = relative_error(out, expected)
        # The output is rounded as the probabilities are.
        limit = 2 * relative_error(plain, expected) + torch.finfo(self.dtype).eps / 2
        assert error <= limit, f"{error:.2e}, at most {limit:.2e}"


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "causal": MultiHeadCase(300, 300, (Span(0, 300, 0, 300, 0),)),
    "causal_of_whole_blocks": MultiHeadCase(256, 256, (Span(0, 256, 0, 256, 0),), heads=1),
    "bottom_right": MultiHeadCase(70, 333, (Span(0, 70, 0, 333, 263),), heads=1),
    "more_queries_than_keys": MultiHeadCase(200, 150, (Span(0, 200, 0, 150, -50),), heads=1),
    "rectangle": MultiHeadCase(129, 257, (Span(0, 129, 0, 257, None),), heads=1, batch=2),
    "one_query": MultiHeadCase(1, 129, (Span(0, 1, 0, 129, None),), heads=3),
    "pack": MultiHeadCase(
        300,
        310,
        (Span(0, 1, 0, 1, 0), Span(3, 150, 4, 151, 0), Span(150, 290, 160, 300, 0)),
        batch=2,
    ),
    "halves_of_context_parallelism": MultiHeadCase(
        200, 400, (Span(0, 100, 0, 100, 0), Span(100, 200, 0, 400, 300)), heads=1
    ),
    "width_128_fp16": MultiHeadCase(
        140, 300, (Span(0, 140, 0, 300, 160),), width=128, dtype=FP16, magnitude=3.0
    ),
    "width_96": MultiHeadCase(140, 140, (Span(0, 140, 0, 140, 0),), width=96, values=64),
    "width_192_values_64": MultiHeadCase(64, 70, (Span(0, 64, 0, 70, 6),), values=64),
    "sharp": MultiHeadCase(140, 140, (Span(0, 140, 0, 140, 0),), heads=1, magnitude=8.0),
    # By less than a reference may be exceeded (8), in two blocks by more, and by more in each; in
    # warps no row, some rows, or all.
    "growing": MultiHeadCase(
        128, 520, (Span(0, 128, 0, 520, None),), heads=1, growth=(0.0, 0.0, 5.0, 11.0, 20.0)
    ),
    "growing_fp16": MultiHeadCase(
        70, 520, (Span(0, 70, 0, 520, 450),), heads=1, dtype=FP16, growth=(7.9, 8.1, -9.0, 3.0)
    ),
    "nobody_sees_anything": MultiHeadCase(5, 9, (Span(1, 3, 0, 9, -8),)),
    "no_spans": MultiHeadCase(3, 9, ()),
    "no_keys": MultiHeadCase(5, 0, ()),
    "no_queries": MultiHeadCase(0, 5, ()),
}
CHUNK = (Span(0, 150, 3, 420, 267),)
PACK = (Span(0, 70, 0, 70, 0), Span(71, 260, 71, 260, 0))
HALVES = (Span(0, 140, 0, 140, 0), Span(140, 280, 0, 560, 420))
# Queries that do not see a key yet, and queries that do not see any more.
BOTH_ENDS = (Span(0, 200, 0, 150, -50), Span(200, 330, 150, 250, 200))
# Windows within a block, of one, and beside it; ending a block of 64, past all tokens.
WINDOWS = {
    f"{name}_{window}": (length, keys, spans, window)
    for name, length, keys, spans, windows in (
        ("causal", 261, 261, (Span(0, 261, 0, 261, 0),), (1, 127, 128, 129, 191, 300)),
        ("chunk", 150, 420, CHUNK, (100, 129)),
        ("pack", 262, 262, PACK, (2, 128)),
        ("halves", 280, 560, HALVES, (129, 256)),
        ("both_ends", 331, 250, BOTH_ENDS, (63, 190)),
    )
    for window in windows
}
CASES |= {
    f"window_{name}": MultiHeadCase(q, k, spans, heads=1, width=96, values=64, window=window)
    for name, (q, k, spans, window) in WINDOWS.items()
}
CASES |= {f"sink_{name}": replace(case, sink=True) for name, case in CASES.items()}
