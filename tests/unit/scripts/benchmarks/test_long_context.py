"""One rank in one process: its tokens, what it computes, and the model of the exchange."""

import pytest
import torch

from absorbed_mla.context_parallel.layout import ContextParallelLayout
from absorbed_mla.context_parallel.strategy import ContextParallel
from absorbed_mla.sequences import SequenceLayout
from benchmarks.kit.simulated_rank import (
    SimulatedGroup,
    Timeline,
    exposed_seconds,
    simulated_exchange,
)
from benchmarks.long_context import LongCase, LongContextBenchmark
from tests.support.cases import TINY, random_weights
from tests.support.dsa import TINY_DSA
from tests.support.dsa_layer import build
from tests.support.harness import Setup, build_attention, load_weights
from tests.support.numerics import relative_error

RANKS, TOKENS = 4, 32


@pytest.mark.parametrize(("cp", "parts"), [(2, 1), (2, 4), (8, 2), (16, 8)])
def test_parts_are_the_rank(cp, parts):
    """They hold its tokens, early and late ones, and see as many keys as every rank's share."""
    case, tokens = LongCase("dsa", 128, 512, cp), SequenceLayout.dense(512)
    found = [ContextParallelLayout(tokens, *case.place(i, parts)) for i in range(parts)]
    rank = ContextParallelLayout(tokens, *case.place())
    assert sorted(i for one in found for i in one.tokens().tolist()) == rank.tokens().tolist()
    pairs = sum(span.num_pairs for one in found for span in one.gathered_spans(causal=True))
    assert pairs == 512 // cp * 513 // 2


class Played(SimulatedGroup):
    """A rank of a group whose others send what was recorded of them."""

    def __init__(self, rank, timeline, recorded, record):
        super().__init__(rank, RANKS, timeline, RANKS)
        self.recorded, self.record, self.ring = recorded, record, 0

    def sent_by(self, rank, own):
        if not own.is_floating_point():
            return own
        number = len(self.timeline.messages)
        if self.record:
            self.recorded.setdefault((self.rank(), number), own.detach().clone())
            return super().sent_by(rank, own)
        if self.ring:  # the rank before passes on what it has got
            return self.recorded[(self.rank() - number - 1) % RANKS, 0]
        return self.recorded[rank, number]


@pytest.mark.parametrize(
    ("sparse", "comm_type"), [(False, "all_gather"), (True, "all_gather"), (False, "p2p")]
)
def test_rank_computes_its_rows_of_the_whole(sparse, comm_type):
    """With what the others send, in float64; each rank, messages as long as the docs say."""
    setup = Setup(cp_comm_type=comm_type)
    if sparse:
        layer = build(TINY_DSA, setup, random_weights(TINY_DSA))
    else:
        layer = build_attention(TINY, setup)
        load_weights(layer, TINY, setup, random_weights(TINY))
    x = torch.randn(TOKENS, 1, TINY.hidden, dtype=torch.float64)
    whole = layer(x, None)[0]
    timeline, recorded = Timeline(on_gpu=False), {}
    layout = SequenceLayout.dense(TOKENS)
    with simulated_exchange(timeline):
        for record, rank in [(flag, r) for flag in (True, False) for r in range(RANKS)]:
            group = Played(rank, timeline, recorded, record)
            group.ring = comm_type == "p2p"
            layer.context_parallel = ContextParallel(group, comm_type, layer.dims)
            tokens = ContextParallelLayout(layout, RANKS, rank).tokens()
            timeline.begin()
            own = layer(x[tokens], None)[0]
            sent = [message.num_bytes for message in timeline.messages]
            assert sum(sent) == TOKENS // RANKS * 3 * 8 * (layer.dims.kv_down_dim + 16 * sparse)
            assert record or relative_error(own, whole[tokens]) < 1e-12
    assert ("select" in timeline.seconds()) == sparse


# Bytes, and when a message is begun and waited for; at 10 bytes per second.
@pytest.mark.parametrize(
    ("messages", "seconds"),
    [
        ([], 0),
        ([(20, 1.0, 1.0)], 2),
        ([(20, 1.0, 4.0)], 0),
        ([(20, 1.0, 2.5)], 0.5),
        ([(20, 0.0, 9.0), (10, 1.0, 1.0)], 2),  # behind the first one
        ([(20, 0.0, 1.0), (20, 1.0, 2.0)], 2),  # begun as much later as the first one delays
    ],
)
def test_exposed(messages, seconds):
    assert exposed_seconds(messages, 10) == pytest.approx(seconds)


def test_a_case_that_was_left_out_has_no_figures():
    """Those of the case before it are not its own."""
    benchmark = object.__new__(LongContextBenchmark)
    measured, left_out = (LongCase("dsa", 16, 1024, cp) for cp in (2, 4))
    benchmark.case, benchmark.more = measured, {"settings": "absorbed"}
    assert benchmark.failed(measured, MemoryError()).more == {"settings": "absorbed"}
    assert benchmark.failed(left_out, MemoryError()).more == {}
