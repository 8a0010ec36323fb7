"""The reference backend, which every kernel is compared with, against a dense softmax.

The dense twin below holds the whole score matrix and leaves gradients to autograd. float64.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import self_attention_spans
from absorbed_mla.sequences import SequenceLayout
from tests.support import world
from tests.support.combinations import grid
from tests.support.differentiable import attention
from tests.support.numerics import relative_error

BATCH, HEADS, WIDTH, ROPE, VALUE = 2, 3, 5, 4, 6
SCALE = 0.37
BOUND = 1e-12


@dataclass(frozen=True)
class Case:
    """A layout of sequences, causality and an attention mask."""

    tokens: int = 13
    batch: int = BATCH
    causal: bool = True
    segments: tuple[tuple[int, int], ...] | None = None
    mask: str | None = None

    def attention_mask(self) -> Tensor | None:
        """Bool, True where hidden; query 4 of the first sequence sees nothing."""
        if self.mask is None:
            return None
        generator = torch.Generator().manual_seed(7)
        rows = self.tokens if self.mask == "rows" else 1
        hidden = torch.rand(self.batch, 1, rows, self.tokens, generator=generator) < 0.4
        if self.mask == "rows":
            hidden[0, 0, 4] = True
        return hidden.to(world.device())

    def rules(self, chunk: int = 4) -> ScoreRules:
        layout = SequenceLayout.dense(self.tokens)
        if self.segments is not None:
            starts = tuple(start for start, _ in self.segments)
            slots = tuple(b - a for a, b in zip(starts, (*starts[1:], self.tokens)))
            lengths = tuple(end - start for start, end in self.segments)
            layout = SequenceLayout(self.tokens, starts, lengths, slots, packed=True)
        mask = self.attention_mask()
        spans = self_attention_spans(layout, self.causal)
        return ScoreRules(SCALE, spans, mask, query_chunk_size=chunk)

    def hidden(self) -> Tensor:
        """Bool [B, 1, S, S], True where a query may not see a key."""
        visible = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        for start, end in self.segments or ((0, self.tokens),):
            visible[start:end, start:end] = True
        if self.causal:
            visible = visible.tril()
        hidden = ~visible.to(world.device()).expand(self.batch, 1, -1, -1)
        mask = self.attention_mask()
        return hidden if mask is None else hidden | mask


CASES = {
    "causal": Case(),
    "all_keys": Case(causal=False),
    "causal_masked_keys": Case(mask="keys"),
    "masked_rows": Case(causal=False, mask="rows"),
    "causal_masked_rows": Case(mask="rows"),
    "one_token": Case(tokens=1),
    "packed": Case(batch=1, segments=((0, 5), (5, 6), (6, 6), (6, 13))),
    "packed_with_padding": Case(batch=1, segments=((0, 3), (5, 10), (11, 11), (12, 13))),
    "packed_all_keys": Case(batch=1, causal=False, segments=((0, 7), (7, 13))),
}
# Name -> (heads of keys and values, whether the value is the key itself, width of the rotary part).
OPERANDS = {
    "multi_head": (HEADS, False, ROPE),
    "multi_query": (1, False, ROPE),
    "multi_query_key_is_value": (1, True, ROPE),
    "multi_head_no_rope": (HEADS, False, 0),
    "key_is_value_no_rope": (1, True, 0),
}


def operands(case: Case, kind: str = "multi_head", seed: int = 0) -> list[Tensor | None]:
    """Leaves q_content, q_rope, k_content, k_rope, value (or None)."""
    kv_heads, shared, rope = OPERANDS[kind]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, WIDTH), (HEADS, rope), (kv_heads, WIDTH), (rope,), (kv_heads, VALUE)]
    leaves = []
    for shape in shapes[: 4 if shared else 5]:
        full = (case.tokens, case.batch, *shape)
        x = torch.randn(full, generator=generator, dtype=torch.float64)
        leaves.append(x.to(world.device()).requires_grad_())
    return [*leaves, None] if shared else leaves


def dense(case: Case, q_content, q_rope, k_content, k_rope, value) -> tuple[Tensor, Tensor]:
    """The definition; rows that see nothing get output 0 and LSE -inf."""
    heads = (-1, -1, HEADS, -1)
    k, v = k_content.expand(heads), (k_content if value is None else value).expand(heads)
    scores = torch.einsum("qbnd,kbnd->bnqk", q_content, k)
    scores = scores + torch.einsum("qbnr,kbr->bnqk", q_rope, k_rope)
    hidden = case.hidden()
    empty = hidden.all(-1, keepdim=True)
    scores = (scores * SCALE).masked_fill(hidden, -torch.inf).masked_fill(empty, 0.0)
    probs = scores.softmax(-1).masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return torch.einsum("bnqk,kbnv->qbnv", probs, v), lse.permute(2, 0, 1)


def gradients(out: Tensor, lse: Tensor, leaves, lse_weight: float = 0.3) -> list[Tensor]:
    """Gradients of a scalar in which every output and every finite LSE has another weight."""
    generator = torch.Generator().manual_seed(11)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (out, lse)]
    out_weight, lse_weights = (w.to(x) for w, x in zip(weights, (out, lse)))
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    loss = (out * out_weight).sum() + lse_weight * (finite * lse_weights).sum()
    found = torch.autograd.grad(loss, [x for x in leaves if x is not None], allow_unused=True)
    return [x.new_zeros(()) if g is None else g for x, g in zip(leaves, found)]


def assert_equal(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=BOUND, atol=BOUND, msg=lambda m: f"{what}: {m}"
    )


@grid(2, {"name": [*CASES], "kind": [*OPERANDS], "chunk": [4, 1, 256]})
def test_equals_dense_attention(name, kind, chunk):
    """Output, LSE, and the gradients of both, hand-written here and by autograd there.

    A chunk that starts at the wrong key, or a last one that is too long, shows here; so does a row
    that sees nothing, whose softmax is 0 / 0.
    """
    case = CASES[name]
    leaves = operands(case, kind)
    actual = attention(*leaves, case.rules(chunk))
    expected = dense(case, *leaves)
    assert_equal(actual[0], expected[0], "output")
    assert_equal(actual[1], expected[1], "LSE")
    names = ("q_content", "q_rope", "k_content", "k_rope", "value")
    pairs = zip(gradients(*actual, leaves), gradients(*expected, leaves))
    for operand, (mine, theirs) in zip(names, pairs):
        assert_equal(mine, theirs, f"gradient of {operand}")


@pytest.mark.parametrize("kind", OPERANDS)
def test_gradcheck(kind):
    """Finite differences, of the output and of the LSE, independent of any softmax of ours."""
    case = Case(tokens=4, batch=1)
    hidden = torch.arange(4, device=world.device()).eq(2)[None, None, None]
    rules = replace(case.rules(chunk=2), attention_mask=hidden)
    leaves = operands(case, kind)
    given = [x for x in leaves if x is not None and x.numel()]

    def call(*tensors):
        fresh = iter(tensors)
        return attention(
            *(next(fresh) if x is not None and x.numel() else x for x in leaves), rules
        )

    assert torch.autograd.gradcheck(call, given)


@pytest.mark.parametrize("hostile", [torch.nan, 1e300])
def test_padding_between_sequences_is_never_read(hostile):
    """What lies between packed sequences is whatever the memory held."""
    case = CASES["packed_with_padding"]
    clean, dirty = operands(case), operands(case)
    padding = [3, 4, 10, 11]
    with torch.no_grad():
        for x in dirty:
            x[padding] = hostile
    expected = attention(*clean, case.rules())
    actual = attention(*dirty, case.rules())
    for i, (mine, theirs) in enumerate(zip(actual, expected)):
        assert torch.equal(mine, theirs), f"tensor {i}"
    assert not actual[0][padding].any() and (actual[1][padding] == -torch.inf).all()
    found = gradients(*actual, dirty, lse_weight=0.0)
    for mine, theirs in zip(found, gradients(*expected, clean, lse_weight=0.0)):
        assert torch.equal(mine, theirs)
        assert not mine[padding].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_arithmetic_is_fp32_whatever_the_inputs(dtype):
    """Scores of -100 or differences of 1/256 would not survive a softmax in 16 bits."""
    case = Case(tokens=33)
    leaves = [x.detach().to(dtype).requires_grad_() for x in operands(case)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = attention(*leaves, case.rules())
    exact_out, exact_lse = dense(case, *wide)
    assert out.dtype == dtype and lse.dtype == torch.float32
    rounding, fp32 = torch.finfo(dtype).eps, 4 * torch.finfo(torch.float32).eps
    assert relative_error(lse, exact_lse) < fp32
    assert relative_error(out, exact_out) < rounding + fp32
    found = gradients(out, lse, leaves)
    for mine, theirs, x in zip(found, gradients(exact_out, exact_lse, wide), leaves):
        assert mine.dtype == dtype and mine.shape == x.shape
        # The output's gradient is rounded on the way in, ours on the way out.
        assert relative_error(mine, theirs) < 2 * rounding + fp32
