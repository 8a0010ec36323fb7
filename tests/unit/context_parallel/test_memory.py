"""Memory of one rank as the sequence grows with the number of ranks, at a fixed share of each.

One process plays rank 0; what it would receive is what it would send.
"""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from absorbed_mla import AbsorbedMLAOptions, MLADims
from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategies import all_gather
from absorbed_mla.context_parallel.strategies import p2p as ring
from absorbed_mla.context_parallel.strategies.all_gather import AllGather
from absorbed_mla.context_parallel.strategies.p2p import Ring
from absorbed_mla.core_attention.module import LatentCoreAttention
from absorbed_mla.rope import RotaryTable
from absorbed_mla.sequences import SequenceLayout
from tests.support import world
from tests.support.cases import TINY, config_for
from tests.support.memory import PeakMemory

SHARE = 16
SIZES = (4, 8, 16)
FLOAT = 4
LATENT_BYTES = (TINY.kv_lora_rank + TINY.rope) * FLOAT


class Over:
    """Communication that is over as soon as it begins."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Echo:
    """A ring whose every rank holds the same."""

    def __init__(self, x, group, rank) -> None:
        self._buffer = x.clone()

    def received(self) -> torch.Tensor:
        """What was sent."""
        return self._buffer


def gather(out, x, **_):
    out.view(-1, *x.shape).copy_(x.expand(len(out) // len(x), *x.shape))
    return Over()


def scatter(out, x, **_):
    out.copy_(x[: len(out)])
    return Over()


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(all_gather.dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(all_gather.dist, "reduce_scatter_tensor", scatter)
    monkeypatch.setattr(ring, "Transfer", Echo)


def peak(strategy, heads: int, cp_size: int, chunk_size: int = 1) -> int:
    """Most bytes alive during forward and backward, beyond the operands."""
    dims = MLADims.from_config(config_for(replace(TINY, heads=heads)), 1)
    options = AbsorbedMLAOptions(
        form="expanded", query_chunk_size=16, expansion_chunk_size=chunk_size
    )
    core = LatentCoreAttention(config_for(TINY), dims, AttnMaskType.causal, 0.3, options)
    sequences = SequenceLayout.dense(SHARE * cp_size)
    keys = strategy(ContextParallelLayout(sequences, cp_size, 0), True, None, kept=True)
    shapes = [(SHARE, 1, heads * (TINY.nope + TINY.rope))]
    shapes += [(SHARE, 1, TINY.kv_lora_rank + TINY.rope)]
    shapes += [(heads, TINY.nope, TINY.kv_lora_rank), (heads, TINY.v, TINY.kv_lora_rank)]
    leaves = [torch.randn(s, device=world.device(), requires_grad=True) for s in shapes]
    q, kv, w_uk, w_uv = leaves
    plan = core.plan(keys, sequences, cp_size, kv, None)
    # Indices depend on the layout alone and are shared by all layers.
    positions = keys.positions(world.device())
    table = RotaryTable(config_for(TINY)).cos_sin(len(positions) * cp_size, world.device())
    with PeakMemory() as memory:
        query = plan.form.query(q.clone(), w_uk, *(x[positions] for x in table))
        out, _ = core(plan, query, keys.start(kv), w_uk, w_uv)
        out.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)
    return memory.peak


def growth_per_token(peaks: list[int]) -> list[float]:
    """Bytes for every token that the sequence grows by."""
    steps = zip(peaks, peaks[1:], SIZES, SIZES[1:])
    return [(b - a) / (SHARE * (n - m)) for a, b, m, n in steps]


@pytest.mark.no_cover
@pytest.mark.parametrize("heads", [4, 8])
def test_ring_stays_flat(heads):
    """Whatever the length: blocks of latents coming and going, a gradient, bounded chunks."""
    peaks = [peak(Ring, heads, cp_size) for cp_size in SIZES]
    assert max(peaks) - min(peaks) <= SHARE * LATENT_BYTES


@pytest.mark.parametrize("heads", [4, 16])
def test_all_gather_grows_by_latents_alone(heads):
    """And by one head's keys and values, whatever the heads.

    Of the latents: gathered, their gradient, and the order of both. Of a head: keys and values,
    their gradients, and what the reference computes with.
    """
    peaks = [peak(AllGather, heads, cp_size) for cp_size in SIZES]
    one_head = (TINY.nope + TINY.rope + TINY.v) * FLOAT
    assert 0 < max(growth_per_token(peaks)) <= 4 * LATENT_BYTES + 5 * one_head


def test_the_measure_sees_keys_and_values():
    """In one chunk, the same test would fail: they grow with the tokens and the heads."""
    heads = 16
    whole = heads * SHARE * max(SIZES)
    peaks = [peak(AllGather, heads, cp_size, whole) for cp_size in SIZES]
    assert min(growth_per_token(peaks)) > heads * (TINY.nope + TINY.v) * FLOAT
