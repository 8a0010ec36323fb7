"""The attention alone: ours and others', and its measurement."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from absorbed_mla.core_attention.backend import AttentionBackend, AttentionRequest, examine
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient
from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from attention_benchmark import peers
from attention_benchmark.cases import CoreCase, pair_widths
from attention_benchmark.row import Refused, Row, failed
from attention_benchmark.timing import Repeated
from context_parallel_benchmark.arguments import dims_of
from context_parallel_benchmark.processes import Processes

OURS = tuple(f"ours, {name}" for name in CORE_ATTENTION_BACKENDS if name != "auto")
IMPLEMENTATIONS = (*OURS, *peers.FUNCTIONS)
# The reference holds scores in memory: pairs of all heads that it is still measured with.
_REFERENCE_PAIRS = 16 * 4096**2


@dataclass(frozen=True)
class Attention:
    """An attention on fixed inputs.

    Attributes:
        forward: Output and whatever backward needs.
        backward: Gradients of all inputs, from what ``forward`` returned.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def measure_core(case: CoreCase, args: argparse.Namespace, processes: Processes) -> Row:
    """Time of forward and backward; what fails in forward is raised, in backward noted."""
    attention = build(case, args, processes)
    error = ""
    backward: Callable[[Any], Any] | None = attention.backward
    result = attention.forward()
    try:
        attention.backward(result)
    except Exception as problem:
        backward, error = None, f"backward: {failed(case, problem).error}"
    del result
    processes.synchronize()
    repeated = Repeated(attention.forward, backward, lambda: None, processes.on_gpu)
    forward, backward_times, step = repeated.times(repeated.once(), args.seconds_per_row)
    return Row(case=case, forward=forward, backward=backward_times, step=step, error=error)


def build(case: CoreCase, args: argparse.Namespace, processes: Processes) -> Attention:
    """The attention, with random inputs on the device.

    Raises:
        Refused: If the implementation cannot do this case, or is not here.
    """
    dims = dims_of(args)
    scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
    operands = random_operands(case, dims, processes)
    value = operands.k_content if operands.value is None else operands.value
    grad_out = processes.random(case.tokens, 1, case.heads, value.shape[-1])
    if case.implementation in OURS:
        backend = _backend(case, dims, processes)
        return _ours(backend, operands, scale, grad_out)
    attend, inputs = peers.FUNCTIONS[case.implementation](operands, scale)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, grad_out.view_as(out))

    return Attention(attend, backward)


def random_operands(case: CoreCase, dims: dict[str, int], processes: Processes) -> AttentionInputs:
    """Normal values, as a layer has them.

    Expanded, content and rope are together; absorbed, the queries' are apart, and the keys' are
    views of one [latent | k_rope].
    """
    tokens, heads = case.tokens, case.heads
    key_width, value_width = pair_widths(case.form, dims)
    if case.form == "expanded":
        q, k = (processes.random(tokens, 1, heads, key_width) for _ in range(2))
        return AttentionInputs.multi_head(q, k, processes.random(tokens, 1, heads, value_width))
    widths = [value_width, key_width - value_width]
    q_content, q_rope = (processes.random(tokens, 1, heads, width) for width in widths)
    latent, k_rope = processes.random(tokens, 1, key_width).split(widths, dim=-1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)


def _backend(case: CoreCase, dims: dict[str, int], processes: Processes) -> AttentionBackend:
    """Ours, by its name.

    Raises:
        Refused: If it cannot do this, with its reason.
    """
    name = case.implementation.removeprefix("ours, ")
    key_width, value_width = pair_widths(case.form, dims)
    request = AttentionRequest(
        device=processes.device,
        dtype=processes.dtype,
        key_width=key_width,
        value_width=value_width,
        latent=case.form == "absorbed",
        masked=False,
        dropout=False,
    )
    if name == "reference" and case.heads * case.tokens**2 > _REFERENCE_PAIRS:
        raise Refused("the reference is measured at small sizes only")
    runnable, reasons = examine(name, request)
    if not runnable:
        raise Refused(reasons[name])
    return runnable[0]


def _ours(
    backend: AttentionBackend, operands: AttentionInputs, scale: float, grad_out: Tensor
) -> Attention:
    tokens = len(operands.q_content)
    rules = ScoreRules(scale=scale, spans=(Span(0, tokens, 0, tokens, 0),))
    grad = OutputGradient(grad_out, None)

    @torch.no_grad()
    def forward() -> AttentionOutput:
        out, lse = backend.forward(operands, rules)
        return AttentionOutput(out.to(grad_out.dtype), lse)

    @torch.no_grad()
    def backward(attended: AttentionOutput) -> AttentionInputs:
        return backend.backward(grad, attended, operands, rules)

    return Attention(forward, backward)
