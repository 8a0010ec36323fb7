"""Suite "core" of attention.py: causal attention of one sequence, without projections."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from benchmarks import kit
from benchmarks.peers.attention import PEERS

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.masks.spans import Spans
    from absorbed_mla.core_attention.types import AttentionInputs
    from benchmarks.kit.processes import Device

torch: Any = kit.lazy("torch")
FORMS = ("expanded", "absorbed")
OURS = tuple(f"ours, {name}" for name in CORE_ATTENTION_BACKENDS if name != "auto")
IMPLEMENTATIONS = (*OURS, *PEERS)
# The reference holds all scores in memory: the most pairs, of all heads, that it is measured with.
REFERENCE_PAIRS = 16 * 4096**2


@dataclass(frozen=True)
class CoreCase(kit.Case):
    """One implementation on one input."""

    text = "{0.implementation} {0.form} n={0.heads} S={0.tokens}"
    implementation: str  # one of IMPLEMENTATIONS
    form: str  # "expanded" (keys and values of every head) or "absorbed" (one latent)
    heads: int
    tokens: int


def pair_widths(form: str, dims: dict[str, int]) -> tuple[int, int]:
    """Widths of a key and of a value.

    Args:
        form: One of :data:`FORMS`.
        dims: The layer's, by the names of ``kit.DIMS``.
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
    """An attention on fixed inputs."""

    forward: Callable[[], Any]  # returns the output and whatever backward needs
    backward: Callable[[Any], Any]  # returns gradients of all inputs, from what forward returned
    ran: str = ""  # the backend, of ours

    def forget_gradients(self) -> None:
        """There are none but those that ``backward`` returns."""


def measure_core(case: CoreCase, args: argparse.Namespace, processes: Device) -> dict[str, Any]:
    """Times of forward, backward and both, for the row of the case.

    Whatever forward raises is raised; what backward raises is the row's ``error``.
    """
    from benchmarks.kit.timing import Repeated

    attention, error = build_core(case, args, processes), ""
    backward: Callable[[Any], Any] | None = attention.backward
    result = attention.forward()
    try:
        attention.backward(result)
    except Exception as problem:
        backward, error = None, f"backward: {kit.reason(problem)}"
    del result
    processes.synchronize()
    repeated = Repeated(attention.forward, backward, on_gpu=processes.on_gpu)
    times = repeated.times(repeated.once(), args.seconds_per_row)
    return {**named_times(times), "error": error}


def named_times(times: tuple[kit.Times | None, ...]) -> dict[str, kit.Times | None]:
    """Times of ``Repeated`` by the names of a row's fields."""
    return dict(zip(("forward", "backward", "step"), times))


def scale_of(dims: dict[str, int]) -> float:
    """What the scores are multiplied by, in either form."""
    return (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5


def build_core(case: CoreCase, args: argparse.Namespace, processes: Device) -> Attention:
    """The attention, with random inputs on the device.

    Raises:
        kit.Refused: If the implementation does not support the case, or is not installed.
    """
    dims = kit.dims_of(args)
    inputs = random_inputs(case, dims, processes)
    value = inputs.k_content if inputs.value is None else inputs.value
    grad_out = processes.random(case.tokens, 1, case.heads, value.shape[-1])
    if case.implementation in OURS:
        name = case.implementation.removeprefix("ours, ")
        if name == "reference" and case.heads * case.tokens**2 > REFERENCE_PAIRS:
            raise kit.Refused("the reference is measured at small sizes only")
        return our_attention(name, case.form, dims, inputs, grad_out)
    attend, leaves = PEERS[case.implementation](inputs, scale_of(dims))

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out.view_as(out))

    return Attention(attend, backward)


def random_inputs(case: CoreCase, dims: dict[str, int], processes: Device) -> AttentionInputs:
    """Normal values, laid out as in a layer; absorbed, parts of one [latent | k_rope]."""
    from absorbed_mla.core_attention.types import AttentionInputs

    key, value = pair_widths(case.form, dims)
    tokens, heads, random = case.tokens, case.heads, processes.random
    if case.form == "expanded":
        q, k = (random(tokens, 1, heads, key) for _ in range(2))
        return AttentionInputs.multi_head(q, k, random(tokens, 1, heads, value))
    widths = [value, key - value]
    q_content, q_rope = (random(tokens, 1, heads, width) for width in widths)
    latent, k_rope = random(tokens, 1, key).split(widths, dim=-1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)


def our_attention(
    backend: str,
    form: str,
    dims: dict[str, int],
    inputs: AttentionInputs,
    grad_out: Tensor,
    spans: Spans | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Attention:
    """One of our backends.

    Args:
        backend: Its name, or ``"auto"`` for the fastest that can run.
        form: One of :data:`FORMS`.
        dims: The layer's.
        inputs: Of :func:`random_inputs`.
        grad_out: Gradient of the output.
        spans: What a token sees; None for one causal sequence.
        window: Of these, the last ones that it sees; None for all.
        sink: Logits [N] beside the scores, whose gradient is computed, too; or None.

    Raises:
        kit.Refused: If none can run.
    """
    from absorbed_mla.core_attention.backend import AttentionRequest
    from absorbed_mla.core_attention.cost import machine_name, speed
    from absorbed_mla.core_attention.masks.scores import ScoreRules, Sink
    from absorbed_mla.core_attention.masks.spans import Span, Spans
    from absorbed_mla.core_attention.shared_prefix import SharedPrefixBackend
    from absorbed_mla.core_attention.sink import add_sink, sink_gradient
    from absorbed_mla.core_attention.types import AttentionOutput, OutputGradient
    from absorbed_mla.core_attention.window import WindowedBackend
    from absorbed_mla.registry import ATTENTION_BACKENDS

    key_width, value_width = pair_widths(form, dims)
    device, tokens = grad_out.device, len(grad_out)
    spans = Spans([Span(0, tokens, 0, tokens, 0)]) if spans is None else spans
    request = AttentionRequest(
        device=device,
        dtype=grad_out.dtype,
        key_width=key_width,
        value_width=value_width,
        form=form,
        masked=False,
        dropout=False,
        packed=len(spans) > 1,
    )
    runnable, reasons = ATTENTION_BACKENDS.examine(backend, request)
    if not runnable:
        raise kit.Refused("; ".join(dict.fromkeys(reasons.values())))
    chosen = max(runnable, key=lambda one: speed(machine_name(device), one))
    attention = SharedPrefixBackend(chosen) if spans.further else chosen
    attention = WindowedBackend(attention, window) if window else attention
    rules = ScoreRules(scale=scale_of(dims), spans=spans)
    grad = OutputGradient(grad_out, None)

    def own_sink() -> Sink | None:
        return None if sink is None or not attention.sinks else Sink(sink)

    # Nothing requires a gradient here; a layer turns gradients off once for all of its attention.
    def forward() -> AttentionOutput:
        out, lse = attention.forward(inputs, replace(rules, sink=own_sink()))
        if sink is not None and not attention.sinks:
            out, lse = add_sink(out, lse, sink)
        return AttentionOutput(out.to(grad_out.dtype), lse)

    @torch.no_grad()
    def backward(attended: AttentionOutput) -> tuple:
        own = own_sink()
        found = attention.backward(grad, attended, inputs, replace(rules, sink=own))
        if sink is None:
            return found
        return *found, sink_gradient(grad, attended, sink, own.gradients if own else ())

    return Attention(forward, backward, chosen.name)
