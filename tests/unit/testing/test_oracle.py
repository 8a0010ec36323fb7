"""The oracle itself, against finite differences, published numbers and properties of the paper.

If one of these fails, no comparison with the oracle means anything.
"""

from dataclasses import replace

import pytest
import torch

from tests import oracle
from tests.oracle import OracleMLA
from tests.support.cases import TINY, random_weights
from tests.support.numerics import relative_error

# Small enough for finite differences of every weight.
MINUTE = replace(TINY, hidden=5, heads=2, q_lora_rank=3, kv_lora_rank=4, nope=3, rope=2, v=2)
# Two sequences around an empty one, with padding after each.
MINUTE_PACK = oracle.pack((3, 0, 2), (4, 1, 2))


def rows(mla: OracleMLA, count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, mla.hidden, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("q_lora_rank", [None, 3])
def test_gradients_are_finite_differences(q_lora_rank):
    mla = replace(MINUTE, q_lora_rank=q_lora_rank)
    weights = random_weights(mla)
    names = list(weights)

    def layer(x, *tensors):
        named = dict(zip(names, tensors, strict=True))
        return oracle.forward(mla, named, x, MINUTE_PACK)

    inputs = [t.requires_grad_() for t in (rows(mla, 7), *weights.values())]
    assert torch.autograd.gradcheck(layer, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


# DeepSeek-V3, V2-Lite, Kimi-K2 (0711), Kimi-K2 Thinking, Moonlight (no scaling), GLM-5.
@pytest.mark.parametrize(
    ("factor", "mscale_all_dim", "nope", "temperature_squared", "scale"),
    [
        (40, 1.0, 128, 1.873854, 0.1352338),
        (40, 0.707, 128, 1.589626, 0.1147214),
        (32, 1.0, 128, 1.813260, 0.1308608),
        (64, 1.0, 128, 2.004740, 0.1446796),
        (1, 0.0, 128, 1.0, 0.0721688),
        (1, 0.0, 192, 1.0, 0.0625),
    ],
)
def test_softmax_scale_of_released_models(factor, mscale_all_dim, nope, temperature_squared, scale):
    mla = replace(TINY, nope=nope, rope=64, scaling_factor=factor, mscale_all_dim=mscale_all_dim)
    assert oracle.yarn_temperature(factor, mscale_all_dim) ** 2 == pytest.approx(
        temperature_squared, abs=5e-7
    )
    assert mla.softmax_scale() == pytest.approx(scale, abs=5e-8)


def test_yarn_ramp_of_deepseek_v3():
    """Between channel pairs 10 and 23: untouched below, divided by the factor above."""
    mla = replace(
        TINY, rope=64, rotary_base=10000.0, original_context=4096, beta_fast=32.0, beta_slow=1.0
    )
    assert oracle.yarn_ramp_ends(mla) == (10, 23)
    ratio = oracle.yarn_frequencies(mla) / oracle.rope_frequencies(64, 10000.0)
    torch.testing.assert_close(ratio[:11], torch.ones(11, dtype=torch.float64))
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64))
    assert ratio[11:23].diff().lt(0).all()


def test_rotation_turns_neighbouring_channels():
    """Pair (0, 1) at position 1 turns by one radian: the pairs are neighbours, not halves."""
    x = torch.zeros(2, 1, 4, dtype=torch.float64)
    x[:, :, 0] = 1
    mla = replace(TINY, rope=4, rope_type="rope")
    turned = oracle.rotate(x, mla.rotary_table(2))[1, 0]
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(turned, torch.stack((one.cos(), one.sin(), 0 * one, 0 * one)))


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_rotated_products_depend_on_distance_only(rope_type):
    mla = replace(TINY, rope_type=rope_type)
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 1, mla.rope, generator=generator, dtype=torch.float64)
    table = mla.rotary_table(30)
    query, key = (oracle.rotate(t.expand(30, 1, -1), table)[:, 0] for t in (query, key))
    products = query @ key.T
    for distance in (-7, 0, 7):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[0, 0] - products[0, 7]).abs() > 1e-3


def test_a_position_offset_changes_nothing():
    """Attention knows relative positions only, so a shifted table gives the same layer."""
    x, weights = rows(TINY, 9), random_weights(TINY)
    shifted = tuple(t[100:] for t in TINY.rotary_table(109))
    here, there = (
        oracle.forward(TINY, weights, x, oracle.pack((9,)), table) for table in (None, shifted)
    )
    assert relative_error(there, here) < 1e-12


def test_sequences_do_not_see_each_other_nor_the_future_nor_padding():
    weights, x = random_weights(TINY), rows(TINY, 12)
    sequences = oracle.pack((4, 5), (6, 6))
    before = oracle.forward(TINY, weights, x, sequences)
    changed = x.clone()
    changed[[2, 3, 4, 5, 11]] += 1  # the first sequence's end and all padding
    after = oracle.forward(TINY, weights, changed, sequences)
    same = [0, 1, 6, 7, 8, 9, 10]
    torch.testing.assert_close(after[same], before[same], rtol=0, atol=0)
    assert (after[2:4] - before[2:4]).abs().max() > 1e-3
    assert before[[4, 5, 11]].eq(0).all()


def test_a_row_that_sees_nothing_gives_zero_and_no_gradient():
    visible = oracle.causal(4)
    visible[2] = False
    sequences = [oracle.TokenSequence(torch.arange(4), visible)]
    x = rows(TINY, 4)
    result = oracle.evaluate(TINY, random_weights(TINY), x, torch.ones_like(x), sequences)
    assert result.output[2].eq(0).all()
    assert all(torch.isfinite(g).all() for g in result.weight_grads.values())


def test_lower_precision_is_further_away():
    """The evaluations that bounds are derived from really are at the lower precision."""
    weights, x = random_weights(TINY), rows(TINY, 9)
    arguments = (TINY, weights, x, x.flip(0), oracle.pack((9,)))
    exact = oracle.evaluate(*arguments)
    for dtype, low, high in [(torch.float32, 1e-8, 1e-5), (torch.bfloat16, 1e-3, 0.1)]:
        eager = oracle.evaluate(*arguments, dtype=dtype)
        assert low < relative_error(eager.output, exact.output) < high
        for name, gradient in exact.weight_grads.items():
            assert low < relative_error(eager.weight_grads[name], gradient) < high, name
