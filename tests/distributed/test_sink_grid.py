"""Attention sinks and sliding windows against the float64 oracle, in training and over caches.

Run as ``torchrun --nproc-per-node N -m pytest tests/distributed`` with N = 1, 2, 4: every way of
making N of TP and CP. Outputs and the gradients of the input and of every parameter, the sinks'
included, are compared as whole tensors.
"""

from dataclasses import replace

import pytest
import torch

from absorbed_mla import AbsorbedMLAOptions
from absorbed_mla.checkpoint.distributed import load_model_weights, save_model_weights
from tests.distributed import test_inference_grid
from tests.distributed.engines import CROWDED, REQUESTS, alone, assert_same
from tests.distributed.test_oracle_grid import FORM, RECOMPUTE
from tests.distributed.test_sparse_grid import STAGES
from tests.distributed.whole import whole_tensors
from tests.support import dsa_layer, needs, world
from tests.support.backends import kernel_cases, kernels_running
from tests.support.cases import TINY
from tests.support.combinations import few_ranks, grid
from tests.support.dsa import TINY_DSA
from tests.support.engine import engine_of, generate, generating_model
from tests.support.execution import execute
from tests.support.harness import Setup
from tests.support.layouts import LAYOUTS, cut_layout, grid_layout
from tests.support.models import gpt_model
from tests.support.refusal import refusal

pytestmark = needs.processes(1, 2, 4)
# Tensor- and context-parallel size, sequence parallelism and the exchange of latents.
SIZES = {
    1: [(1, 1, False, None)],
    2: [(2, 1, True, None), (1, 2, False, "p2p"), (1, 2, False, "all_gather")],
    4: [(2, 2, True, "p2p"), (2, 2, False, "all_gather"), (1, 4, False, "p2p")],
}.get(world.size(), [])
SINKS = replace(TINY, sinks=True)
# Several windows in a sequence; shorter than a chunk of context parallelism, and longer.
SHAPES = {"sinks": SINKS, "window": replace(TINY, window=3), "both": replace(SINKS, window=5)}
# A window of the token itself, and of several chunks.
TRAINED = SHAPES | {"itself": replace(TINY, window=1), "chunks": replace(SINKS, window=11)}


@grid(
    2,
    {
        "sizes": {"-".join(map(str, size)): size for size in SIZES},
        "layout": LAYOUTS,
        "form": FORM,
        "recompute": RECOMPUTE,
        "shape": TRAINED,
    },
)
def test_training(sizes, shape, layout, form, recompute, error_table):
    """If this fails, the named tensor is wrong in that combination: training there is wrong."""
    tp, cp, sequence_parallel, exchange = sizes
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(
            sequence_parallel=sequence_parallel,
            form=form,
            recompute=recompute,
            cp_comm_type=exchange,
        )
        execution = execute(shape, setup, cut_layout(layout, max(cp, 2)))
        execution.check(error_table, "sinks and windows", layout)


@few_ranks
@grid(2, {"case": {str(case): case for case in kernel_cases()}, "window": (None, 4)})
def test_kernels(case, window, error_table):
    """What a kernel makes of the LSE of keys and sink."""
    with kernels_running(case):
        layout = grid_layout(case.layout, divisible=False)
        mla = replace(case.mla, sinks=True, window=window)
        execution = execute(mla, case.setup(), layout)
    execution.check(error_table, "sinks and windows", case.layout)


@needs.processes(1, 2)
@grid(2, {"shape": SHAPES, "form": FORM, "resident": (None, 5), "cuts": ("tokens", "decode")})
def test_cache(shape, form, resident, cuts, error_table):
    """Prefill in chunks and decode; with a cache in parts, too."""
    setup = Setup(form=form, latent_cache_tokens=resident)
    test_inference_grid.check(shape, setup, cuts, error_table, "sinks and windows")


@grid(1, {"sizes": {"-".join(map(str, s)): s for s in SIZES if s[3] != "p2p"}, "dense": [0, 1]})
def test_sparse(sizes, dense):
    """Beside keys that an indexer chose, whose loss has the attention's probabilities as target."""
    tp, cp, sequence_parallel, _ = sizes
    variant = replace(TINY_DSA, mla=SINKS, topk=64 if dense else TINY_DSA.topk)
    with world.parallel(tp=tp, cp=cp):
        setup = Setup(sequence_parallel=sequence_parallel, form="auto")
        more = {"context_parallel_size": cp, "cp_comm_type": "allgather"}
        dsa_layer.check(
            variant, setup, cut_layout("thd_padded", max(cp, 2)), STAGES["sparse"], **more
        )


@needs.processes(1, 2)
@pytest.mark.parametrize("form", FORM)
def test_engine(form):
    """Chunks, shared prefixes and eviction; two ranks share the cache."""
    found = generate(
        engine_of(
            generating_model(AbsorbedMLAOptions(form=form), softmax_type="learnable"),
            **CROWDED,
            decode_context_parallel=world.size() == 2,
        ),
        REQUESTS,
        log_probs=True,
    )
    assert_same(found.results, alone(softmax_type="learnable").results)
    plain = alone().results
    assert any(one.tokens != other.tokens for one, other in zip(found.results, plain))


@needs.processes(2)
def test_windows_over_a_shared_cache_are_refused():
    with refusal("decode_context_parallel=True", "window_size=(5, 0)"):
        engine_of(generating_model(window_size=(5, 0)), decode_context_parallel=True)


@needs.processes(2)
def test_checkpoint(folder):
    """Saved by two tensor-parallel ranks, each with the sinks of its heads, and read by one."""
    fields = {"num_layers": 2, "softmax_type": "learnable", "init_method_std": 0.5}

    def made(tp: int, seed: int) -> dict[str, torch.Tensor]:
        with world.parallel(tp=tp):
            model = gpt_model(seed=seed, **fields, **world.tp_fields())
            if seed:
                load_model_weights(model, folder)
            else:
                save_model_weights(model, folder)
            named = model.named_parameters()
            return whole_tensors((n, p) for n, p in named if n.endswith("softmax_offset"))

    saved = made(2, 0)
    assert len(saved) == 2 and all(len(x.unique()) == TINY.heads for x in saved.values())
    for tp in (1, 2):
        assert all(torch.equal(x, saved[name]) for name, x in made(tp, 1).items())
