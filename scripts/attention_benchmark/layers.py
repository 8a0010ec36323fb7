"""Layers with their input, and their measurement."""

from __future__ import annotations

import argparse
import dataclasses
import time
from itertools import accumulate
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from absorbed_mla import AbsorbedMLAOptions
from attention_benchmark.cases import LayerCase, document_lengths
from attention_benchmark.row import Refused, Row
from attention_benchmark.timing import Repeated
from context_parallel_benchmark.layers import Subject, layer_config
from context_parallel_benchmark.measure import observe
from context_parallel_benchmark.processes import Processes
from specs.absorbed_mla_layer_specs import get_absorbed_mla_layer_spec


def measure_layer(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Row:
    """Time and memory of a layer; whatever fails is raised."""
    subject = build(case, args, processes)
    ran = _Chosen(subject.layer)
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
        ran=ran.text,
    )


def build(case: LayerCase, args: argparse.Namespace, processes: Processes) -> Subject:
    """The layer in training mode, and random input.

    Raises:
        Refused: If it cannot be built here.
    """
    config = layer_config(case, args, processes)
    if args.rope_fusion and case.implementation == "megatron":
        config = dataclasses.replace(config, apply_rope_fusion=True)
    if case.recompute:
        config = dataclasses.replace(
            config, recompute_granularity="selective", recompute_modules=["mla_up_proj"]
        )
    spec = _attention_spec(case, args, config)
    layer = build_module(spec, config=config, layer_number=1).to(processes.device)
    shape = (case.tokens, 1, args.hidden_size)
    packed = _pack(case, args.seed, processes.device) if case.layout == "thd" else None
    x = processes.random(*shape).requires_grad_()
    return Subject(layer.train(), x, processes.random(*shape), packed)


def _attention_spec(
    case: LayerCase, args: argparse.Namespace, config: MLATransformerConfig
) -> ModuleSpec:
    if case.implementation == "ours":
        options = AbsorbedMLAOptions(form=args.form, core_attention_backend=args.backend)
        layer = get_absorbed_mla_layer_spec(
            config, backend=config.transformer_impl, options=options
        )
    elif HAVE_TE:
        layer = get_gpt_layer_with_transformer_engine_spec(
            multi_latent_attention=True, qk_layernorm=config.qk_layernorm
        )
    else:
        raise Refused("Megatron's standard MLA needs transformer-engine, not installed here")
    return layer.submodules.self_attention


def _pack(case: LayerCase, seed: int, device: torch.device) -> PackedSeqParams:
    lengths = document_lengths(case.tokens, seed)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


class _Chosen:
    """The form and the backend that a layer of ours took, from its plan; "" of another layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.text = ""
        core: Any = getattr(layer, "core_attention", None)
        plan = getattr(core, "plan", None)
        if plan is None:
            return

        def watched(*args, **kwargs):
            made = plan(*args, **kwargs)
            form = type(made.form).__name__.removesuffix("Form").lower()
            self.text = f"{form}, {made.backend.name}"
            return made

        core.plan = watched
