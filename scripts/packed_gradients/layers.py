"""Errors of whole layers, Megatron's and ours, on the same weights and the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from attention_benchmark.peers import only_fused
from chosen_backends import ChosenBackends
from context_parallel_benchmark.row import shortened
from torch import Tensor

from absorbed_mla import AbsorbedMLAOptions
from packed_gradients.row import LayerRow
from tests import oracle
from tests.oracle import OracleMLA, OracleResult, TokenSequence
from tests.support import world
from tests.support.cases import random_weights
from tests.support.harness import Setup, build_attention, load_weights, named_tensors, run
from tests.support.layouts import Layout, dense, packed
from tests.support.numerics import bounds_from_eager, compare
from tests.support.standard import build_standard, load_standard, run_standard

MEGATRON = "megatron"
# By the name of the row -> core_attention_backend.
OURS = {"ours": "auto", "ours, transformer_engine": "transformer_engine"}
# Where the documents of a pack end, in sixteenths of it.
_PACKS = {1: (16,), 2: (11, 16), 5: (1, 4, 5, 12, 16)}


def layouts(tokens: int) -> dict[str, Layout]:
    """One sequence, and packs of 1, 2 and 5 documents, by their names."""
    found = {"sbhd": dense(tokens, 1)}
    for documents, ends in _PACKS.items():
        bounds = [0, *(tokens * end // 16 for end in ends)]
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        found[f"thd, {documents} document{'s' if documents > 1 else ''}"] = packed(lengths)
    return found


def measure_layers(
    mla: OracleMLA,
    tokens: int,
    dtype: torch.dtype,
    layers: str = "transformer_engine",
    only: Callable[[], AbstractContextManager] = only_fused,
) -> Iterator[LayerRow]:
    """Every layer on every layout.

    Args:
        mla: Dimensions.
        tokens: Of each layout.
        dtype: Of weights and activations.
        layers: ``transformer_impl`` of all layers.
        only: What lets TransformerEngine take no attention but cuDNN's.
    """
    weights = {n: w.to(dtype).double() for n, w in random_weights(mla).items()}
    for name, layout in layouts(tokens).items():
        x, output_grad = (layout.random_rows(mla.hidden, seed).to(dtype) for seed in (1, 2))
        exact, eager = (
            named_tensors(mla, _evaluate(mla, weights, x, output_grad, layout, precision))
            for precision in (torch.float64, dtype)
        )
        bounds = bounds_from_eager(eager, exact, dtype)
        for implementation in (MEGATRON, *OURS):
            setup = _setup(implementation, dtype, layers)
            try:
                with only() if implementation == MEGATRON else nullcontext():
                    ran, result = _run(implementation, mla, setup, weights, layout, x, output_grad)
            except Exception as error:
                text = shortened(f"{type(error).__name__}: {error}", 1000)
                yield LayerRow(implementation, name, "", {}, {}, text)
                continue
            found = compare(named_tensors(mla, result), exact, bounds)
            yield LayerRow(implementation, name, ran, found.errors, found.bounds, "")


def _setup(implementation: str, dtype: torch.dtype, layers: str) -> Setup:
    """As a user has it, less the short chunks of the tests."""
    options = AbsorbedMLAOptions()
    return Setup(
        form="auto",
        dtype=dtype,
        backend=layers,
        core_attention_backend=OURS.get(implementation, "auto"),
        query_chunk_size=options.query_chunk_size,
        expansion_chunk_size=options.expansion_chunk_size,
    )


def _run(
    implementation: str,
    mla: OracleMLA,
    setup: Setup,
    weights: dict[str, Tensor],
    layout: Layout,
    x: Tensor,
    output_grad: Tensor,
) -> tuple[str, OracleResult]:
    """What the layer ran, and its output and gradients."""
    if implementation == MEGATRON:
        standard = build_standard(mla, setup)
        load_standard(standard, mla, setup, weights)
        return "", run_standard(standard, mla, layout, x, output_grad)
    ours = build_attention(mla, setup)
    load_weights(ours, mla, setup, weights)
    ran = ChosenBackends(ours)
    result = run(ours, mla, setup, layout, x, output_grad)
    return str(ran), result


def _evaluate(
    mla: OracleMLA,
    weights: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    layout: Layout,
    dtype: torch.dtype,
) -> OracleResult:
    """The oracle, on this process's device."""
    device = world.device()
    sequences = [TokenSequence(s.rows.to(device), s.visible.to(device)) for s in layout.sequences]
    cos, sin = mla.rotary_table(layout.tokens)
    rows = [t.to(device).flatten(0, 1) for t in (x, output_grad)]
    found = oracle.evaluate(
        mla,
        {name: weight.to(device) for name, weight in weights.items()},
        *rows,
        sequences,
        (cos.to(device), sin.to(device)),
        dtype,
    )
    gradients = {name: gradient.cpu() for name, gradient in found.weight_grads.items()}
    return OracleResult(found.output.cpu(), found.input_grad.cpu(), gradients)
