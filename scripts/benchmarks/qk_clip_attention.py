"""Suites "maxima" and "cost" of qk_clip.py: attention of every backend, and the whole layer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks import kit
from benchmarks.core_attention import backend_of, over_latent, pair_widths

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.core_attention.backend import AttentionBackend
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.max_logits import MaxLogits
    from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput
    from benchmarks.kit.processes import Processes
    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
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
class AttentionCase(kit.Case):
    """One backend on one input."""

    text = "{suite} {backend} n={heads} S={tokens} {layout} {wanted} {scores}"
    suite: str  # "maxima" or "cost"
    backend: str  # of BACKENDS, or "layer": the whole layer with what "auto" takes
    heads: int  # query heads
    tokens: int  # of the sequence or pack
    layout: str = "sbhd"  # or "thd" with padding between sequences
    wanted: str = "log"  # one of WANTED
    scores: str = "flat"  # one of SCORES

    @property
    def form(self) -> str:
        """Of the attention."""
        return BACKENDS[self.backend]


@dataclass(frozen=True, kw_only=True)
class AttentionRow(kit.Row):
    """What was measured of one case; seconds are of forward, and of forward and backward."""

    case: AttentionCase
    without_forward: kit.Times | None = None  # without the largest scores
    without_step: kit.Times | None = None  # likewise
    recorded_forward: kit.Times | None = None  # with them
    recorded_step: kit.Times | None = None  # likewise
    # Largest deviation from float64 of a maximum above the threshold, or of any where every one is
    # wanted; relative to it, or to 1 where it is smaller.
    worst: float | None = None
    worst_lse: float | None = None  # largest deviation of the LSE of a call that records
    # By how much a largest score exceeds the bound recorded in its place at most.
    above_bound: float | None = None
    ran: str = ""  # form and backend of the layer

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
        case=case,
        worst=float(off[above].abs().max()) if above.any() else None,
        worst_lse=float(off_lse),
        above_bound=float(low.max()) if len(low) else None,
    )


def _cost(case: AttentionCase, args: argparse.Namespace, processes: Processes) -> AttentionRow:
    """Time with and without the largest scores, in turn."""
    from absorbed_mla.core_attention.types import OutputGradient
    from benchmarks.kit.timing import Repeated

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
    return _compared(case, [step(rules), step(with_them)], args)


def _cost_of_layer(
    case: AttentionCase, args: argparse.Namespace, processes: Processes
) -> AttentionRow:
    """The same of a whole layer, whose option is switched on and off."""
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.chosen_backends import ChosenBackends
    from benchmarks.kit.layers import build, layer_config
    from benchmarks.kit.timing import Repeated

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

    row = _compared(case, [step(False), step(True)], args)
    return replace(row, ran=str(chosen))


def _compared(
    case: AttentionCase, works: Sequence[Repeated], args: argparse.Namespace
) -> AttentionRow:
    """The row of a step without the largest scores and of one with them, in turns."""
    from benchmarks.kit.timing import times_in_turns

    without, recorded = times_in_turns(works, args.seconds_per_row)
    return AttentionRow(
        case=case,
        without_forward=without[0],
        without_step=without[1],
        recorded_forward=recorded[0],
        recorded_step=recorded[1],
    )


def _backend(
    case: AttentionCase, args: argparse.Namespace, processes: Processes
) -> AttentionBackend:
    """The backend of a case.

    Raises:
        Refused: If it cannot run here.
    """
    return backend_of(
        case.backend,
        case.form,
        kit.dims_of(args),
        processes,
        packed=case.layout == "thd",
        max_logits=True,
        small_max_logits=case.wanted == "log",
    )


def _inputs(case: AttentionCase, args: argparse.Namespace, processes: Processes) -> AttentionInputs:
    """Normal values; in "maxima" the heads' scores are from 1/8 to 8 times the first's."""
    from absorbed_mla.core_attention.types import AttentionInputs

    key, value = pair_widths(case.form, kit.dims_of(args))
    tokens, heads = case.tokens, case.heads
    size: float | Tensor = SCORES[case.scores]
    if case.suite == "maxima":
        exponents = torch.linspace(-3, 3, heads, device=processes.device)
        size = size * torch.exp2(exponents)[:, None]
    q = (processes.random(tokens, 1, heads, key) * size).to(processes.dtype)
    if case.form == "expanded":
        k = processes.random(tokens, 1, heads, key)
        _disturb(case, q, k)
        return AttentionInputs.multi_head(q, k, processes.random(tokens, 1, heads, value))
    kv = processes.random(tokens, 1, key)
    _disturb(case, q, kv)
    q_content, q_rope = (x.contiguous() for x in q.split([value, key - value], dim=-1))
    return over_latent(q_content, q_rope, kv)


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

    dims = kit.dims_of(args)
    scale = (dims["qk-head-dim"] + dims["qk-pos-emb-head-dim"]) ** -0.5
    spans = Spans(Span(start, end, start, end, 0) for start, end in _sequences(case))
    return ScoreRules(scale, spans)


def _nothing_yet(case: AttentionCase, processes: Processes, dtype) -> MaxLogits:
    from absorbed_mla.core_attention.max_logits import MaxLogits

    return MaxLogits(torch.full((case.heads,), -torch.inf, dtype=dtype, device=processes.device))


def _double(inputs: AttentionInputs) -> AttentionInputs:
    return type(inputs)(*(None if x is None else x.double() for x in inputs))
