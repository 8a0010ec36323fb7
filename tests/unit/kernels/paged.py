"""Comparisons that all tests of paged kernels make: with the reference, and to the bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from absorbed_mla.fp8_latents import Fp8Latents
from absorbed_mla.inference.backends.reference import paged_reference
from absorbed_mla.inference.rows import Rows
from tests.support.paged import NO_BLOCK, PagedCase

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

# Query, rope query, cache, rows and scale, as PagedCase makes them.
Inputs = tuple[Tensor, Tensor, Tensor, Rows, float]
Result = Sequence[Tensor]


def assert_equals_reference(
    found: Result,
    inputs: Inputs,
    window: tuple[int, int | None] = (0, None),
    lse_tolerance: float = 1e-4,
) -> None:
    """As near as rounding the probabilities and the output allows; exact where nothing is seen."""
    out, lse = found
    q_content, q_rope, cache, rows, scale = inputs
    double = (q_content.double(), q_rope.double(), cache.double(), rows, scale)
    expected, expected_lse = paged_reference(*double, *window)
    assert (out.dtype, lse.dtype) == (q_content.dtype, torch.float32)
    unseen = expected_lse == -torch.inf
    assert (lse[unseen] == -torch.inf).all() and not out[unseen].any()
    error = (out.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error <= max(torch.finfo(q_content.dtype).eps, 2e-6), error
    seen = ~unseen
    torch.testing.assert_close(
        lse[seen].double(), expected_lse[seen], atol=lse_tolerance, rtol=1e-5
    )


def decoded(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs over FP8 rows, with what the rows are read as in the model's dtype, in ``dtype``."""
    q_content, q_rope, cache, rows, scale = inputs
    latents = Fp8Latents(q_content.shape[-1], q_rope.shape[-1])
    read = latents.decode(cache, q_content.dtype).to(dtype)
    return q_content, q_rope, read, rows, scale


def assert_same_bits(found: Result, expected: Result) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def assert_reads_lengths_from_the_device(attend: Callable[..., Result], case: PagedCase) -> None:
    """A CUDA graph is recorded with bounds, and replayed with any lengths below them."""
    q_content, q_rope, cache, rows, scale = case.inputs(DEVICE)
    wide = torch.nn.functional.pad(rows.block_table, (0, 20), value=NO_BLOCK)
    bounds = replace(rows, block_table=wide, max_query_length=8, max_kv_length=400)
    expected = paged_reference(q_content, q_rope, cache, rows, scale)
    found = attend((q_content, q_rope, cache, bounds, scale))
    torch.testing.assert_close(found[0], expected[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-5)


def assert_chunks_have_the_same_bits(
    attend: Callable[..., Result], inputs: Inputs, chunks: Sequence[tuple[int, int]]
) -> None:
    """In parity mode: parts of the only row's tokens, each on its own."""
    q_content, q_rope, cache, rows, scale = inputs
    whole = attend(inputs, batch_invariant=True)
    for start, end in chunks:
        part = Rows.of((end - start,), (end,), rows.block_table)
        query = q_content[start:end], q_rope[start:end]
        found = attend((*query, cache, part, scale), batch_invariant=True)
        assert_same_bits(found, [every[start:end] for every in whole])


def training_operands(inputs: Inputs) -> list[Tensor]:
    """The only row as a training forward has it: query, rope query, latent, k_rope, [S, 1, ...]."""
    q_content, q_rope, cache, rows, _ = inputs
    position, size = torch.arange(rows.max_kv_length, device=cache.device), cache.shape[1]
    keys = cache[rows.block_table[0][position // size].long(), position % size]
    width = q_content.shape[-1]
    return [x[:, None] for x in (q_content, q_rope, keys[:, :width], keys[:, width:])]
