"""Steps that read prompts, padded as for CUDA graphs, over tensor-parallel ranks."""

from collections.abc import Callable, Hashable
from functools import partial

import pytest

from absorbed_mla.inference.attention import CachedAttention
from absorbed_mla.serving.sampling.parameters import SamplingParams
from absorbed_mla.serving.scheduler.full_cuda_graphs import FullCudaGraphs
from absorbed_mla.serving.scheduler.prefill_graphs import PrefillGraphs
from tests.support import needs
from tests.support.combinations import grid
from tests.support.engine import engine_of, generating_model, prompt
from tests.support.tile_reference import TileReference

pytestmark = needs.processes(2)

GREEDY = SamplingParams(max_tokens=4, temperature=0, logprobs=0)
# Together, in chunks beside requests that decode, and alone.
BATCHES = [[prompt(length, length) for length in each] for each in ((20, 150, 61, 5, 100), (99,))]


class Padded(FullCudaGraphs):
    """Runs steps of the sizes of graphs as they are."""

    def run(self, key: Hashable, step: Callable[[], None], larger: float | None = None) -> None:
        self._graphs[key] = None
        step()


@needs.no_gpu
@grid(1, {"expands": (False, True), "sequence_parallel": (False, True)})
def test_same_tokens(monkeypatch, sequence_parallel, expands):
    """Also where ranks divide the tokens of a step, of which 101 could not be divided."""
    tiles = TileReference()
    for choice in ("_expanded_backend", "_backend_in_graphs") if expands else ():
        monkeypatch.setattr(CachedAttention, choice, lambda self, *_: tiles)
    model = generating_model(sequence_parallel=sequence_parallel)
    sizes = {"blocks": 40, "num_cuda_graphs": 2, "chunked_prefill": True, "step_tokens": 128}
    theirs, graphs = engine_of(model, **sizes), Padded(model)
    name = "absorbed_mla.serving.engine.prefill_graphs"
    made = partial(PrefillGraphs, expands=expands)
    monkeypatch.setattr(name, lambda host, *_: made(host, graphs, 101))
    engine = engine_of(model, **sizes, prefill_graph_tokens=101)
    for prompts in BATCHES:
        found, expected = (each.generate(prompts, GREEDY) for each in (engine, theirs))
        for one, other in zip(found, expected, strict=True):
            assert one.tokens == other.tokens and not one.error
            assert one.log_probs == pytest.approx(other.log_probs, abs=5e-5)
    assert {size.token_count for size, _ in graphs._graphs} == {96, 100}
    # Those of whole prompts attend expanded.
    assert {whole for _, whole in graphs._graphs} == ({False, True} if expands else {False})
    assert ("DeviceSpans" in tiles.kinds) == expands
