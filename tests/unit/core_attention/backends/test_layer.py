"""The layer on kernels, against the oracle, in one process.

Without a GPU the Triton kernels run in Triton's interpreter, and packages have stand-ins of the
same signatures. ``tests/distributed`` runs the kernels at other sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from absorbed_mla.context_parallel import strategy
from absorbed_mla.context_parallel.strategy import LocalKeys
from absorbed_mla.core_attention.backends import hopper_expanded
from absorbed_mla.core_attention.backends.flash_attention_4 import FlashAttention4Backend
from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineBackend
from absorbed_mla.core_attention.key_source import KeyBlock
from absorbed_mla.core_attention.masks.spans import Span, self_attention_spans
from absorbed_mla.registry import ATTENTION_BACKENDS
from tests.support import fake_packages, needs
from tests.support.backends import KernelCase, kernel_cases, kernels_running, triton_interpreter
from tests.support.cases import INTERPRETED, WIDE
from tests.support.combinations import grid
from tests.support.execution import execute
from tests.support.fake_packages.cudnn import PlainCudnn
from tests.support.gluon_emulation import emulated
from tests.support.layouts import LAYOUTS, dense, grid_layout, packed
from tests.support.multi_head_backward import emulate_backward

# Triton decides when a kernel is decorated.
with triton_interpreter():
    import absorbed_mla.kernels.triton.backward
    import absorbed_mla.kernels.triton.forward  # noqa: F401

# The first of every kernel.
CASES = {case.core_attention_backend: case for case in reversed(kernel_cases())}


@pytest.fixture
def flash_attention_4_fake(monkeypatch):
    interface = fake_packages.flash_attention_4.install(monkeypatch)
    yield FlashAttention4Backend()
    assert interface.calls > 1


@pytest.fixture
def hopper_expanded_fake(monkeypatch):
    """The kernels in an emulation of Gluon."""
    pytest.importorskip("triton.experimental.gluon")
    from absorbed_mla.kernels.hopper import multi_head

    monkeypatch.setattr(hopper_expanded, "CUDNN", PlainCudnn())
    emulate_backward(monkeypatch)
    with emulated(multi_head, "attend_multi_head", "multi_head_kernel"):
        yield hopper_expanded.HopperExpandedBackend()


@pytest.fixture
def transformer_engine_fake(monkeypatch):
    fused = fake_packages.transformer_engine.install(monkeypatch)
    yield TransformerEngineBackend()
    assert {call.function for call in fused.calls} == {"forward", "backward"}


FAKES = {
    "flash_attention_4": "expanded",
    "hopper_expanded": "expanded",
    "transformer_engine": "expanded",
}
# What a stand-in that computes as the kernel does needs.
NARROWEST = {"hopper_expanded": (WIDE, torch.bfloat16)}


# On a GPU the packages themselves run, if they are there.
@pytest.fixture(params=CASES if needs.HAS_GPU else [*CASES, *FAKES])
def case(request, monkeypatch):
    """A kernel that runs."""
    name = request.param
    case = CASES.get(name)
    if case is None:
        shape = NARROWEST.get(name, (INTERPRETED, torch.float32))
        case = KernelCase(FAKES[name], name, *shape, "sbhd", False)
        backend = request.getfixturevalue(f"{name}_fake")
        monkeypatch.setattr(backend, "why_not", lambda request: None)
        monkeypatch.setitem(ATTENTION_BACKENDS._registered, name, backend)
    with kernels_running(case):
        yield case


FEATURES = {
    "plain": {},
    "sinks": {"sinks": True},
    "window": {"window": 4},
    "both": {"sinks": True, "window": 4},
}


@grid(2, {"layout": LAYOUTS, "recomputes": [False, True], "features": FEATURES})
def test_layer(case, recomputes, layout, features):
    """If this fails, training with ``core_attention_backend`` of that name is wrong."""
    setup = replace(case, recomputes=recomputes).setup()
    mla = replace(case.mla, **features)
    execute(mla, setup, grid_layout(layout, divisible=False)).check()


class Blocks(LocalKeys):
    """The keys of one process, five at a time: as in a ring, but in order."""

    SIZE = 5

    @property
    def num_blocks(self) -> int:
        return -(-self.layout.num_tokens // self.SIZE)

    def blocks(self, kv, keep):
        spans = self_attention_spans(self.layout, self.causal)
        for first in range(0, self.layout.num_tokens, self.SIZE):
            last = min(first + self.SIZE, self.layout.num_tokens)
            found = (part_of(span, first, last) for span in spans)
            yield KeyBlock(kv[first:last], tuple(filter(None, found)), unused)

    def gradient(self, kv, block_gradient):
        return torch.cat([block_gradient(block) for block in self.blocks(kv, False)]).to(kv.dtype)


def unused():
    pytest.fail("only dropout asks for the tokens")


def part_of(span: Span, first: int, last: int) -> Span | None:
    """What a causal ``span`` shows of the keys from ``first`` to ``last``, counted from the first.

    Queries before those keys see none of them, and are in no span then.
    """
    start, end = max(span.key_start, first), min(span.key_end, last)
    query_start = span.query_start + start - span.key_start
    if start >= end or query_start >= span.query_end:
        return None
    return Span(query_start, span.query_end, start - first, end - first, 0)


@pytest.mark.parametrize(
    "layout", [dense(13, 2), packed((5, 1, 0, 7), (6, 3, 2, 9))], ids=["sbhd", "thd_padded"]
)
def test_blocks_of_keys(case, layout, monkeypatch):
    """As under context parallelism: backward gets the LSE over all blocks, and some queries see
    nothing of a block."""
    monkeypatch.setattr(strategy, "LocalKeys", Blocks)
    execute(case.mla, case.setup(), layout).check()
