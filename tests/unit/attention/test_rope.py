"""The rotary table: far positions, all frequencies, both ends of YaRN's ramp, and its growth."""

import math
from dataclasses import replace

import pytest
import torch

from absorbed_mla.rope import RotaryTable, inverse_frequencies, yarn_frequencies
from tests import oracle
from tests.support.cases import TINY, config_for

CPU = torch.device("cpu")
# DeepSeek-V3's rotary settings.
V3 = replace(
    TINY, rope=64, rotary_base=10000.0, original_context=4096, beta_fast=32.0, mscale_all_dim=1.0
)
PLAIN = replace(V3, rope_type="rope", scaling_factor=1.0, mscale_all_dim=0.0)
# Odd, so that no product with a frequency of 0.1 or 0.01 happens to be exact in fp32.
FAR = 99_991


@pytest.mark.parametrize(
    "mla",
    [PLAIN, replace(PLAIN, rope=8), V3, replace(V3, rotary_base=50000.0)],
    ids=["rope", "rope of 8", "yarn", "yarn, base 50000"],
)
def test_far_positions_are_exact(mla):
    """Angles in fp32 are up to 0.004 rad off here; a cosine in fp32 is rounded by 3e-8."""
    cos, sin = RotaryTable(config_for(mla)).cos_sin(FAR + 1, CPU)
    frequencies = oracle.yarn_frequencies(mla) if mla.rope_type == "yarn" else None
    for channel in range(mla.rope // 2):
        frequency = mla.rotary_base ** (-2 * channel / mla.rope)
        if frequencies is not None:
            frequency = frequencies[channel].item()
        for position in (1, FAR // 3, FAR):
            angle = math.fmod(position * frequency, 2 * math.pi)
            assert abs(cos[position, channel].item() - math.cos(angle)) < 1e-7, (channel, position)
            assert abs(sin[position, channel].item() - math.sin(angle)) < 1e-7, (channel, position)


# YaRN's context and beta_fast -> share of every frequency that is interpolated. With 8 rotary
# channels and base 10 a pair turns t times in 4 log10(context / (2 pi t)).
RAMPS = {
    # From 1.2 - down to 1 - to 4.8 - up to 5: beyond the last pair, 3.
    "ends beyond the last pair": (100, 8.0, [0, 0, 1 / 4, 2 / 4]),
    # From 2.8 to 8.8, which is more than rope - 1 = 7.
    "ends beyond all channels": (1000, 32.0, [0, 0, 0, 1 / 5]),
    # From -1.2, which is taken for 0, to 4.8.
    "begins before the first pair": (100, 32.0, [0, 1 / 5, 2 / 5, 3 / 5]),
    # From -2.0, which is taken for 0, to 1.6.
    "within the pairs": (16, 8.0, [0, 1 / 2, 1, 1]),
}


@pytest.mark.parametrize("name", RAMPS)
def test_ends_of_yarns_ramp(name):
    """The published bound is the number of channels less one, not of pairs."""
    context, beta_fast, expected = RAMPS[name]
    mla = replace(V3, rope=8, rotary_base=10.0, original_context=context, beta_fast=beta_fast)
    plain = inverse_frequencies(mla.rope, mla.rotary_base)
    found = yarn_frequencies(RotaryTable(config_for(mla)).parameters, plain)
    # found = plain (share / factor + 1 - share)
    share = (1 - found / plain) / (1 - 1 / mla.scaling_factor)
    assert share.tolist() == pytest.approx(expected, abs=1e-12)


def test_factors_divide_frequencies():
    config, factors = config_for(replace(PLAIN, rope=8)), (1.0, 1.5, 2.0, 7.0)
    cos, _ = RotaryTable(config, factors).cos_sin(FAR + 1, CPU)
    angles = FAR * inverse_frequencies(8, PLAIN.rotary_base) / torch.tensor(factors).double()
    assert torch.equal(cos[FAR], angles.cos().float())
    assert not torch.equal(cos, RotaryTable(config).cos_sin(FAR + 1, CPU)[0]), "tables are shared"
    with pytest.raises(ValueError, match="= 4 numbers with rope_type 'rope', got 3"):
        RotaryTable(config, factors[:3])


def test_growing_changes_no_row():
    config = config_for(TINY)
    table = RotaryTable(config)
    short = table.cos_sin(5, CPU)
    long = table.cos_sin(50, CPU)
    for fresh, a, b in zip(RotaryTable(config).cos_sin(50, CPU), short, long):
        assert torch.equal(b, fresh)
        assert torch.equal(a, fresh[:5])
    assert [len(x) for x in table.cos_sin(7, CPU)] == [7, 7]


def test_is_built_rarely():
    """Sequences that get longer one token at a time must not each cost a table."""
    table = RotaryTable(config_for(TINY))
    tables = {table.cos_sin(length, CPU)[0].data_ptr() for length in range(1, 1000)}
    assert len(tables) <= 11
