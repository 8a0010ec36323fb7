"""The decode kernel for Hopper over FP8 rows for few heads; see test_fp8_rows.py for more heads.

Without a GPU its source is run by PyTorch, as test_paged_hopper.py says.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from absorbed_mla.fp8_latents import Fp8Latents
from tests.support.backends import triton_interpreter
from tests.support.paged import PagedCase, fp8_inputs
from tests.unit.kernels.paged import (
    DEVICE,
    assert_chunks_have_the_same_bits,
    assert_equals_reference,
    assert_same_bits,
    decoded,
)
from tests.unit.kernels.test_paged_hopper import FP16, attend, decode

BASE = PagedCase((1, 1, 0, 1), (200, 1, 9, 127), 16, 64, 512, 64, padding=2)
CASES = {
    "block_64": BASE,
    "block_16": replace(BASE, block_size=16),
    "block_48": replace(BASE, block_size=48),
    "block_1024": replace(BASE, block_size=1024),
    "heads_12": replace(BASE, heads=12),
    "heads_20": replace(BASE, query_lengths=(1, 1), kv_lengths=(130, 64), heads=20),
    "tokens_16_rows": replace(BASE, query_lengths=(3, 4, 1), kv_lengths=(70, 4, 66), heads=3),
    "tokens_32_rows": replace(BASE, query_lengths=(1, 2), kv_lengths=(140, 66)),
    "more_tokens_than_keys": replace(BASE, query_lengths=(5, 2), kv_lengths=(3, 2), heads=2),
    "rope_16": replace(BASE, query_lengths=(1, 1), kv_lengths=(65, 64), rope=16),
    "huge": replace(BASE, query_lengths=(1,), kv_lengths=(200,), magnitude=100.0),
    # Four programs: each goes through several rows, and rows lie in several programs.
    "many_rows": replace(
        BASE, query_lengths=(1,) * 9, kv_lengths=tuple(range(1, 300, 35)), heads=4, padding=0
    ),
    "long_and_short_rows": replace(
        BASE,
        query_lengths=(1,) * 7,
        kv_lengths=(3, 700, 65, 1, 450, 128, 191),
        heads=4,
        padding=0,
    ),
    "window": replace(BASE, window=(37, 140)),
}


@pytest.fixture(autouse=True)
def _interpreted():
    with triton_interpreter():
        yield


@pytest.fixture
def rows(monkeypatch) -> list[int]:
    """Of the tiles of all launches of the kernel for few rows."""
    found: list[int] = []
    launch = decode._launch

    def record(kernel, *args):
        found.extend([args[-1]["ROWS"]] if "ROWS" in args[-1] else [])
        launch(kernel, *args)

    monkeypatch.setattr(decode, "_launch", record)
    return found


@pytest.mark.no_cover
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, rows):
    """Over the same, exact, latents; amid NaN, and blocks that are not there."""
    case = CASES[name]
    inputs, window = fp8_inputs(case, DEVICE), case.window or (0, None)
    assert_equals_reference(attend(inputs, window), decoded(inputs, torch.float64), window)
    assert rows == [32 if name in ("heads_20", "tokens_32_rows") else 16]


@pytest.mark.no_cover
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_splits(num_splits):
    """Of requests of one key, too: most of their splits are empty."""
    inputs = fp8_inputs(BASE, DEVICE)
    found = attend(inputs, num_splits=num_splits)
    assert_equals_reference(found, decoded(inputs, torch.float64))


def test_values_have_the_bits_of_decoded_rows(rows):
    """A token that sees one key returns it; of any magnitude, and any value that there is."""
    count = 24
    case = PagedCase((1,) * count, (1,) * count, 2, 16, 512, 64)
    q_content, q_rope, cache, batch, scale = fp8_inputs(case, DEVICE)
    parts = Fp8Latents(512, 64).parts(cache)
    block = batch.block_table[:, 0].long()
    # Every byte but the two that are NaN.
    bits = [x for x in range(256) if x & 0x7F != 0x7F]
    values = torch.tensor(bits + bits + [0, 1, 2, 3], dtype=torch.uint8, device=DEVICE)
    assert len(values) == 512
    make = torch.Generator().manual_seed(0)
    for request in range(count):
        order = torch.randperm(512, generator=make).to(DEVICE)
        parts.values[block[request], 0] = values[order]
    exponents = torch.linspace(-100, 100, count * 4).reshape(count, 4)
    scales = torch.rand(count, 4, generator=make) + torch.exp2(exponents)
    parts.scales[block, 0] = scales.to(DEVICE)
    q_content.zero_()
    out, _ = attend((q_content, q_rope, cache, batch, scale), num_splits=1)
    expected = Fp8Latents(512, 64).decode(cache[block, 0], case.dtype)[:, None, :512]
    assert torch.equal(out, expected.expand_as(out))
    assert rows == [16]


@pytest.mark.parametrize("heads", [16, 32])
def test_any_order(heads):
    """Roles and copies may go on in any order, from tile to tile, too: the bits are the same."""
    case = replace(BASE, query_lengths=(1,) * 3, kv_lengths=(1, 350, 64), heads=heads)
    inputs = fp8_inputs(case, DEVICE)
    expected = attend(inputs, num_splits=1)
    for seed in range(1, 7):
        assert_same_bits(attend(inputs, num_splits=1, seed=seed), expected)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("name", ["block_64", "many_rows", "long_and_short_rows", "window"])
def test_rows_together_and_apart(name, block_size):
    """Where nothing lies between rows they are asked for ahead; the result has the same bits.

    Also where a program goes from row to row, begins within one, or has one without keys; amid
    blocks that are not there, which it may not ask for.
    """
    case = replace(CASES[name], block_size=block_size)
    q_content, q_rope, cache, batch, scale = fp8_inputs(case, DEVICE)
    together, window = cache.contiguous(), case.window or (0, None)
    assert cache.stride(1) > cache.shape[2] == together.stride(1)
    found = attend((q_content, q_rope, together, batch, scale), window)
    assert_same_bits(found, attend((q_content, q_rope, cache, batch, scale), window))


def test_other_kernels_take_what_it_cannot(rows):
    """Parity mode, where it would depend on the number of tokens; fp16; blocks of odd sizes."""
    case = replace(BASE, query_lengths=(6,), kv_lengths=(6,), heads=4, padding=0)
    inputs = fp8_inputs(case, DEVICE)
    assert_chunks_have_the_same_bits(attend, inputs, ((0, 1), (2, 6)))
    for change in ({"dtype": FP16}, {"block_size": 20}, {"heads": 33}):
        inputs = fp8_inputs(replace(BASE, query_lengths=(1,), kv_lengths=(30,), **change), DEVICE)
        assert_equals_reference(attend(inputs), decoded(inputs, torch.float64))
    assert rows == []
