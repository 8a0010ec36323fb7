"""Suite "core" of attention.py: causal attention of one sequence, without projections."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from benchmarks.kit.arguments import dims_of
from benchmarks.kit.report import Refused, Times, reason
from benchmarks.peers.attention import PEERS

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.types import AttentionInputs
    from benchmarks.kit.processes import Processes

FORMS = ("expanded", "absorbed")
OURS = tuple(f"ours, {name}" for name in CORE_ATTENTION_BACKENDS if name != "auto")
IMPLEMENTATIONS = (*OURS, *PEERS)
# The reference holds all scores in memory: the most pairs, of all heads, that it is measured with.
REFERENCE_PAIRS = 16 * 4096**2


@dataclass(frozen=True)
class CoreCase:
    """One implementation on one input.

    Attributes:
        implementation: One of :data:`IMPLEMENTATIONS`.
        form: ``"expanded"`` (keys and values of every head) or ``"absorbed"`` (one latent).
        heads: Query heads.
        tokens: Of the sequence.
    """

    implementation: str
    form: str
    heads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.implementation} {self.form} n={self.heads} S={self.tokens}"


def pair_widths(form: str, dims: dict[str, int]) -> tuple[int, int]:
    """Widths of a key and of a value.

    Args:
        form: One of :data:`FORMS`.
        dims: The layer's, by the names of ``kit.arguments.DIMS``.
    """
    rope = dims["qk-pos-emb-head-dim"]
    if form == "absorbed":
        return dims["kv-lora-rank"] + rope, dims["kv-lora-rank"]
    return dims["qk-head-dim"] + rope, dims["v-head-dim"]


def attention_flops(case: CoreCase, dims: dict[str, int]) -> tuple[float, float]:
    """Floating-point operations of forward and of backward; see attention.py."""
    key, value = pair_widths(case.form, dims)
    pairs = case.heads * case.tokens**2 / 2
    return pairs * 2 * (key + value), pairs * 2 * (3 * key + 2 * value)


@dataclass(frozen=True)
class Attention:
    """An attention on fixed inputs.

    Attributes:
        forward: Returns the output and whatever backward needs.
        backward: Returns gradients of all inputs, from what ``forward`` returned.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def measure_core(case: CoreCase, args: argparse.Namespace, processes: Processes) -> dict[str, Any]:
    """Times of forward, backward and both, for the row of the case.

    Whatever forward raises is raised; what backward raises is the row's ``error``.
    """
    from benchmarks.kit.timing import Repeated

    attention = build_core(case, args, processes)
    error = ""
    backward: Callable[[Any], Any] | None = attention.backward
    result = attention.forward()
    try:
        attention.backward(result)
    except Exception as problem:
        backward, error = None, f"backward: {reason(problem)}"
    del result
    processes.synchronize()
    repeated = Repeated(attention.forward, backward, on_gpu=processes.on_gpu)
    times = repeated.times(repeated.once(), args.seconds_per_row)
    return {**named_times(times), "error": error}


def named_times(times: tuple[Times, Times | None, Times | None]) -> dict[str, Times | None]:
    """Times of ``Repeated`` by the names of a row's fields."""
    return dict(zip(("forward", "backward", "step"), times))


def build_core(case: CoreCase, args: argparse.Namespace, processes: Processes) -> Attention:
    """The attention, with random inputs on the device.

    Raises:
        Refused: If the implementation does not support the case, or is not installed.
    """
    import torch

    dims = dims_of(args)
    scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
    inputs = random_inputs(case, dims, processes)
    value = inputs.k_content if inputs.value is None else inputs.value
    grad_out = processes.random(case.tokens, 1, case.heads, value.shape[-1])
    if case.implementation in OURS:
        return _ours(case, dims, processes, inputs, scale, grad_out)
    attend, leaves = PEERS[case.implementation](inputs, scale)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out.view_as(out))

    return Attention(attend, backward)


def random_inputs(case: CoreCase, dims: dict[str, int], processes: Processes) -> AttentionInputs:
    """Normal values, laid out as in a layer.

    Expanded: nope and rope parts are one tensor. Absorbed: those of the query are two tensors, and
    the key's are views of one [latent | k_rope].
    """
    from absorbed_mla.core_attention.types import AttentionInputs

    tokens, heads = case.tokens, case.heads
    key_width, value_width = pair_widths(case.form, dims)
    if case.form == "expanded":
        q, k = (processes.random(tokens, 1, heads, key_width) for _ in range(2))
        return AttentionInputs.multi_head(q, k, processes.random(tokens, 1, heads, value_width))
    widths = [value_width, key_width - value_width]
    q_content, q_rope = (processes.random(tokens, 1, heads, width) for width in widths)
    latent, k_rope = processes.random(tokens, 1, key_width).split(widths, dim=-1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)


def _ours(
    case: CoreCase,
    dims: dict[str, int],
    processes: Processes,
    inputs: AttentionInputs,
    scale: float,
    grad_out: Tensor,
) -> Attention:
    """One of our backends.

    Raises:
        Refused: If it does not support the case.
    """
    import torch

    from absorbed_mla.core_attention.backend import AttentionRequest
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span
    from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
    from absorbed_mla.registry import ATTENTION_BACKENDS

    name = case.implementation.removeprefix("ours, ")
    if name == "reference" and case.heads * case.tokens**2 > REFERENCE_PAIRS:
        raise Refused("the reference is measured at small sizes only")
    key_width, value_width = pair_widths(case.form, dims)
    request = AttentionRequest(
        device=processes.device,
        dtype=processes.dtype,
        key_width=key_width,
        value_width=value_width,
        form=case.form,
        masked=False,
        dropout=False,
    )
    runnable, reasons = ATTENTION_BACKENDS.examine(name, request)
    if not runnable:
        raise Refused(reasons[name])
    backend = runnable[0]
    rules = ScoreRules(scale=scale, spans=(Span(0, case.tokens, 0, case.tokens, 0),))
    grad = OutputGradient(grad_out, None)

    # Nothing requires a gradient here; a layer turns gradients off once for all of its attention.
    def forward() -> AttentionOutput:
        out, lse = backend.forward(inputs, rules)
        return AttentionOutput(out.to(grad_out.dtype), lse)

    @torch.no_grad()
    def backward(attended: AttentionOutput) -> AttentionInputs:
        return backend.backward(grad, attended, inputs, rules)

    return Attention(forward, backward)
