"""Layers with their input, and their measurement."""

from __future__ import annotations

import argparse
import time

from megatron.core.transformer.spec_utils import build_module

from absorbed_mla import AbsorbedMLAOptions
from attention_benchmark.cases import LayerCase, document_lengths
from attention_benchmark.row import Refused, Row
from attention_benchmark.timing import Repeated
from chosen_backends import ChosenBackends
from context_parallel_benchmark.layers import Subject, attention_spec, layer_config, pack
from context_parallel_benchmark.measure import observe
from context_parallel_benchmark.processes import Processes


def measure_layer(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Row:
    """Time and memory of a layer; whatever fails is raised."""
    subject = build(case, args, processes)
    ran = ChosenBackends(subject.layer)
    # The first step compiles, and allocates what stays allocated.
    subject.backward(subject.forward())
    subject.forget_gradients()
    processes.synchronize()
    begin = time.perf_counter()
    observed = observe(subject, processes)
    seconds = time.perf_counter() - begin
    repeated = Repeated(
        subject.forward, subject.backward, subject.forget_gradients, processes.on_gpu
    )
    forward, backward, step = repeated.times(seconds, args.seconds_per_row)
    return Row(
        case=case,
        forward=forward,
        backward=backward,
        step=step,
        kept_bytes=observed.kept_bytes,
        peak_bytes=observed.peak_bytes,
        ran=str(ran),
    )


def build(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Subject:
    """The layer in training mode, and random input.

    Raises:
        Refused: If it cannot be built here.
    """
    ours = case.implementation == "ours"
    recompute = "mla_up_proj" if case.recompute else None
    config = layer_config(case, args, processes, recompute, args.rope_fusion and not ours)
    try:
        options = None
        if ours:
            options = AbsorbedMLAOptions(form=args.form, core_attention_backend=args.backend)
        spec = attention_spec(config, options)
    except ValueError as error:
        raise Refused(str(error)) from None
    layer = build_module(spec, config=config, layer_number=1).to(processes.device)
    shape = (case.tokens, 1, args.hidden_size)
    packed = None
    if case.layout == "thd":
        packed = pack(document_lengths(case.tokens, args.seed), processes.device)
    x = processes.random(*shape).requires_grad_()
    return Subject(layer.train(), x, processes.random(*shape), packed)
