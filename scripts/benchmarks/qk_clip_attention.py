"""Suites "maxima" and "cost" of qk_clip.py: attention of every backend, and the whole layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.kit.arguments import dims_of
from benchmarks.kit.report import Refused, Times

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.backend import AttentionBackend
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.max_logits import MaxLogits
    from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput
    from benchmarks.kit.processes import Processes

BACKENDS = {
    "hopper": "absorbed",
    "triton": "absorbed",
    "transformer_engine": "expanded",
    "cudnn": "expanded",
    "flash_attention_4": "expanded",
    "reference": "expanded",
}
LAYER = "layer"
# What is wanted: every maximum (log_max_attention_logit), or those above the threshold (qk_clip).
WANTED = ("log", "clip")
THRESHOLD = 100.0
# By what a query is multiplied: scores of many keys are about the largest, or few stand out.
SCORES = {"flat": 0.3, "peaked": 6.0}
# Of what lies between sequences; a maximum over it would be far too large.
_BETWEEN = 30.0


@dataclass(frozen=True)
class AttentionCase:
    """One backend on one input.

    Attributes:
        suite: ``"maxima"`` or ``"cost"``.
        backend: Of :data:`BACKENDS`, or ``"layer"``: the whole layer with what ``auto`` takes.
        heads: Query heads.
        tokens: Of the sequence or pack.
        layout: ``"sbhd"``, or ``"thd"`` with padding between sequences.
        wanted: One of :data:`WANTED`.
        scores: One of :data:`SCORES`.
    """

    suite: str
    backend: str
    heads: int
    tokens: int
    layout: str = "sbhd"
    wanted: str = "log"
    scores: str = "flat"

    def __str__(self) -> str:
        size = f"n={self.heads} S={self.tokens} {self.layout}"
        return f"{self.suite} {self.backend} {size} {self.wanted} {self.scores}"


@dataclass(frozen=True)
class AttentionRow:
    """What was measured of one case; seconds are of forward, and of forward and backward.

    Attributes:
        case: What.
        without_forward: Without the largest scores.
        without_step: Likewise.
        recorded_forward: With them.
        recorded_step: Likewise.
        worst: Largest deviation from float64 of a maximum above the threshold, or of any where
            every one is wanted; relative to it, or to 1 where it is smaller.
        worst_lse: Largest deviation of the LSE of a call that records.
        above_bound: By how much a largest score exceeds the bound recorded in its place at most.
        ran: Form and backend of the layer.
        error: Empty, or why figures are missing.
    """

    case: AttentionCase
    without_forward: Times | None = None
    without_step: Times | None = None
    recorded_forward: Times | None = None
    recorded_step: Times | None = None
    worst: float | None = None
    worst_lse: float | None = None
    above_bound: float | None = None
    ran: str = ""
    error: str = ""

    def figures(self) -> dict[str, float]:
        """Deviations, or milliseconds and ratios."""
        if self.case.suite == "maxima":
            named = {"worst": self.worst, "worst_lse": self.worst_lse}
            named["above_bound"] = self.above_bound
            return {name: value for name, value in named.items() if value is not None}
        pairs = {
            "forward": (self.without_forward, self.recorded_forward),
            "step": (self.without_step, self.recorded_step),
        }
        found: dict[str, float] = {}
        for name, (without, recorded) in pairs.items():
            assert without is not None and recorded is not None
            found[f"{name}_ms"] = 1e3 * without.median
            found[f"{name}_recorded_ms"] = 1e3 * recorded.median
            found[f"{name}_ratio"] = recorded.median / without.median
        return found


def measure_attention(
    case: AttentionCase, args: argparse.Namespace, processes: Processes
) -> AttentionRow:
    """The row of a case."""
    if case.backend == LAYER:
        return _cost_of_layer(case, args, processes)
    return (_maxima if case.suite == "maxima" else _cost)(case, args, processes)


def _maxima(case: AttentionCase, args: argparse.Namespace, processes: Processes) -> AttentionRow:
    """Recorded maxima beside those of float64."""
    import torch

    backend = _backend(case, args, processes)
    inputs, rules = _inputs(case, args, processes), _rules(case, args)
    exact = _nothing_yet(case, processes, torch.float64)
    double = replace(rules, max_logits=exact, query_chunk_size=64)
    from absorbed_mla.core_attention.backends.reference import reference_forward

    truth = reference_forward(_double(inputs), double)
    # The median head is at the threshold: some are above, some below.
    threshold = float(exact.of_heads.median()) if case.wanted == "clip" else -torch.inf
    found = replace(_nothing_yet(case, processes, torch.float32), threshold=threshold)
    output = backend.forward(inputs, replace(rules, max_logits=found))
    recorded, expected = found.of_heads.double(), exact.of_heads
    off = (recorded - expected) / expected.abs().clamp(min=1.0)
    above = expected > threshold
    seen = truth.lse > -torch.inf
    off_lse = (output.lse.double() - truth.lse)[seen].abs().max()
    low = -off[~above]
    return AttentionRow(
        case,
        worst=float(off[above].abs().max()) if above.any() else None,
        worst_lse=float(off_lse),
        above_bound=float(low.max()) if len(low) else None,
    )


def _cost(case: AttentionCase, args: argparse.Namespace, processes: Processes) -> AttentionRow:
    """Time with and without the largest scores, in turn."""
    import torch

    from absorbed_mla.core_attention.types import OutputGradient
    from benchmarks.kit.timing import Repeated, times_in_turns

    backend = _backend(case, args, processes)
    inputs, rules = _inputs(case, args, processes), _rules(case, args)
    threshold = THRESHOLD if case.wanted == "clip" else -torch.inf
    found = replace(_nothing_yet(case, processes, torch.float32), threshold=threshold)
    value = inputs.k_content if inputs.value is None else inputs.value
    grad = OutputGradient(processes.random(case.tokens, 1, case.heads, value.shape[-1]), None)

    def step(own: ScoreRules) -> Repeated:
        @torch.no_grad()
        def forward() -> AttentionOutput:
            # As in the first forward of a step.
            if own.max_logits is not None:
                own.max_logits.of_heads.fill_(-torch.inf)
            return backend.forward(inputs, own)

        @torch.no_grad()
        def backward(output: AttentionOutput) -> AttentionInputs:
            attended = output._replace(out=output.out.to(grad.out.dtype))
            return backend.backward(grad, attended, inputs, own)

        return Repeated(forward, backward, on_gpu=processes.on_gpu)

    with_them = replace(rules, max_logits=found)
    works = step(rules), step(with_them)
    without, recorded = times_in_turns(works, args.seconds_per_row)
    return AttentionRow(case, *without, *recorded)


def _cost_of_layer(
    case: AttentionCase, args: argparse.Namespace, processes: Processes
) -> AttentionRow:
    """The same of a whole layer, whose option is switched on and off."""
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.chosen_backends import ChosenBackends
    from benchmarks.kit.layers import build, layer_config
    from benchmarks.kit.timing import Repeated, times_in_turns

    config = layer_config(args, processes, heads=case.heads, recompute=None)
    subject = build(config, AbsorbedMLAOptions(), processes, case.tokens, None)
    chosen = ChosenBackends(subject.layer)
    core = subject.layer.core_attention

    def step(records: bool) -> Repeated:
        def forward() -> Tensor:
            config.qk_clip, config.qk_clip_threshold = records, THRESHOLD
            config.log_max_attention_logit = records and case.wanted == "log"
            core.current_max_attn_logits = None
            output = subject.forward()
            assert (core.current_max_attn_logits is not None) == records
            return output

        finish: Callable[[], None] = subject.forget_gradients
        return Repeated(forward, subject.backward, finish, on_gpu=processes.on_gpu)

    works = step(False), step(True)
    without, recorded = times_in_turns(works, args.seconds_per_row)
    return AttentionRow(case, *without, *recorded, ran=str(chosen))


def _backend(
    case: AttentionCase, args: argparse.Namespace, processes: Processes
) -> AttentionBackend:
    """The backend of a case.

    Raises:
        Refused: If it cannot run here.
    """
    from absorbed_mla.core_attention.backend import AttentionRequest
    from absorbed_mla.registry import ATTENTION_BACKENDS

    key, value = _widths(case, args)
    request = AttentionRequest(
        form=BACKENDS[case.backend],
        device=processes.device,
        dtype=processes.dtype,
        key_width=key,
        value_width=value,
        masked=False,
        dropout=False,
        packed=case.layout == "thd",
        max_logits=True,
        small_max_logits=case.wanted == "log",
    )
    runnable, reasons = ATTENTION_BACKENDS.examine(case.backend, request)
    if not runnable:
        raise Refused(reasons[case.backend])
    return runnable[0]


def _widths(case: AttentionCase, args: argparse.Namespace) -> tuple[int, int]:
    from benchmarks.core_attention import pair_widths

    return pair_widths(BACKENDS[case.backend], dims_of(args))


def _inputs(case: AttentionCase, args: argparse.Namespace, processes: Processes) -> AttentionInputs:
    """Normal values; in "maxima" the heads' scores differ in size, from 1/8 to 8 times the first's.

    The key's two parts, in the absorbed form, are views of one [latent | k_rope].
    """
    import torch

    from absorbed_mla.core_attention.types import AttentionInputs

    key, value = _widths(case, args)
    tokens, heads = case.tokens, case.heads
    size: float | Tensor = SCORES[case.scores]
    if case.suite == "maxima":
        exponents = torch.linspace(-3, 3, heads, device=processes.device)
        size = size * torch.exp2(exponents)[:, None]
    q = (processes.random(tokens, 1, heads, key) * size).to(processes.dtype)
    if BACKENDS[case.backend] == "expanded":
        k = processes.random(tokens, 1, heads, key)
        _disturb(case, q, k)
        return AttentionInputs.multi_head(q, k, processes.random(tokens, 1, heads, value))
    kv = processes.random(tokens, 1, key)
    _disturb(case, q, kv)
    parts = [value, key - value]
    q_content, q_rope = (x.contiguous() for x in q.split(parts, dim=-1))
    latent, k_rope = kv.split(parts, dim=-1)
    return AttentionInputs(q_content, q_rope, latent.unsqueeze(2), k_rope, None)


def _disturb(case: AttentionCase, *tensors: Tensor) -> None:
    """Make what lies between sequences large."""
    covered = 0
    for start, end in [*_sequences(case), (case.tokens, case.tokens)]:
        for x in tensors:
            x[covered:start] = _BETWEEN
        covered = end


def _sequences(case: AttentionCase) -> list[tuple[int, int]]:
    """Begin and end of each; in a pack, with rows between them that belong to none."""
    if case.layout == "sbhd":
        return [(0, case.tokens)]
    cuts = (0, case.tokens // 3, case.tokens // 2, case.tokens)
    return [(start, end - 3) for start, end in zip(cuts, cuts[1:])]


def _rules(case: AttentionCase, args: argparse.Namespace) -> ScoreRules:
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span, Spans

    dims = dims_of(args)
    scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
    spans = Spans(Span(start, end, start, end, 0) for start, end in _sequences(case))
    return ScoreRules(scale, spans)


def _nothing_yet(case: AttentionCase, processes: Processes, dtype) -> MaxLogits:
    import torch

    from absorbed_mla.core_attention.max_logits import MaxLogits

    return MaxLogits(torch.full((case.heads,), -torch.inf, dtype=dtype, device=processes.device))


def _double(inputs: AttentionInputs) -> AttentionInputs:
    return type(inputs)(*(None if x is None else x.double() for x in inputs))
