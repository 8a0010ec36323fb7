#!/usr/bin/env python3
"""Measure training on a pack in which a group's prompt stands once, beside a pack without that.

    $ python scripts/benchmarks/shared_prefix.py docs/measurements/shared-prefix
    $ python scripts/benchmarks/shared_prefix.py /tmp/core --only "attention alone" --heads 16
    $ python scripts/benchmarks/shared_prefix.py RESULTS --render one.json other.json

Both packs hold the same answers to one prompt, in the pack without shared prefixes each behind a
copy of it. They are computed in turns, with the same weights, after outputs and gradients of one
have been compared with the other's; a difference is that of the Frobenius norms. Attention alone
has no projections; layers are DeepSeek-V3's, the whole transformer layer with its dense MLP. Both
packs recompute what --recompute names.

"step" is forward and backward, of the shared pack over that of the other one, as are "forward",
"kept" (memory allocated by forward until backward) and "peak"; "tokens" and "pairs" are what these
can reach where time goes by tokens, or by pairs of a query and a key. Where the pack without shared
prefixes would not fit a GPU of 80 GB by the arithmetic of ``attention_bytes``, prompt and answers
are halved, which leaves "tokens" and "pairs" as they are. Output:

    12.3 s  attention layer n=128 8192+16x1024 (expanded, hopper_expanded): step 0.24, forward 0.25
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from absorbed_mla.options import CORE_ATTENTION_BACKENDS
from benchmarks import core_attention, kit
from benchmarks.core_attention import CoreCase, pair_widths
from benchmarks.kit.tables import gibibytes

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.prefix_tree import PrefixTree
    from benchmarks.kit.layers import Subject
    from benchmarks.kit.timing import Repeated

torch: Any = kit.lazy("torch")
CORE = "attention alone, "
# The most important ones first, because --time-limit leaves out the last ones.
WORKS = (CORE + "expanded", "attention layer", "transformer layer", CORE + "absorbed")
PACKS = ("shared", "unshared")
MOST_BYTES = 70e9
# Of norms; what bf16 and fp32 leave of sums in another order.
MOST_DIFFERENCE = {"cuda": 2e-2, "cpu": 1e-4}


@dataclass(frozen=True)
class PrefixCase(kit.Case):
    """One group of answers to a prompt, and what is computed of it."""

    text = "{0.work} n={0.heads} {0.prompt}+{0.answers}x{0.answer}"
    work: str  # one of WORKS
    heads: int
    prompt: int  # tokens
    answers: int
    answer: int  # tokens of each

    @property
    def plotted_as(self) -> str:
        """Name of its line."""
        return self.work

    @property
    def unshared_tokens(self) -> int:
        """Of the pack without shared prefixes."""
        return self.answers * (self.prompt + self.answer)

    @property
    def tokens_ratio(self) -> float:
        """Tokens of the shared pack over the other's."""
        return (self.prompt + self.answers * self.answer) / self.unshared_tokens

    @property
    def pairs_ratio(self) -> float:
        """Likewise of pairs of a query and a key that it sees."""
        triangle, whole = (n * (n + 1) / 2 for n in (self.prompt, self.prompt + self.answer))
        return (triangle + self.answers * (whole - triangle)) / (self.answers * whole)


def attention_bytes(case: PrefixCase, dims: dict[str, int]) -> int:
    """What attention alone of the pack without shared prefixes needs in bf16.

    The query, the output, its gradient, that of the query, which is summed in fp32, and expanded
    keys, values and their gradients.
    """
    key, value = pair_widths(case.work.removeprefix(CORE), dims)
    numbers = 2 * key + 2 * value + 2 * key
    if case.work.endswith("expanded"):
        numbers += 2 * (key + value)
    return 2 * numbers * case.heads * case.unshared_tokens


@dataclass(frozen=True)
class Measured:
    """Figures of one pack."""

    forward: kit.Times
    step: kit.Times  # forward and backward
    kept_bytes: int | None  # allocated by forward until backward; None without a GPU
    peak_bytes: int | None  # the most allocated in a step beyond weights, inputs, output gradient


@dataclass(frozen=True, kw_only=True)
class Row(kit.Row):
    """One case, with figures of both packs or the error that prevented them."""

    shared: Measured | None = None
    unshared: Measured | None = None
    differences: dict[str, float] = field(default_factory=dict)  # of output and gradients, by name
    ran: str = ""  # backend, of a layer its form, too


class PrefixReport(kit.Report):
    """One run; ratios are of the shared pack to the other one."""

    row, case = Row, PrefixCase
    plotted = tuple(
        (f"{name} of the unshared pack's, {{0.answers}} answers", name, "heads")
        for name in ("step", "forward", "kept", "peak")
    )

    def figures(self, row: Row) -> dict[str, float]:
        """Ratios, milliseconds and GiB of both packs, and the largest difference."""
        found = {}
        for name in PACKS:
            own = getattr(row, name)
            times = {f"{one}_ms": 1e3 * getattr(own, one).median for one in ("forward", "step")}
            found |= {f"{name} {key}": value for key, value in (times | gibibytes(own)).items()}
        ratios = {
            name.partition("_")[0]: found[f"shared {name}"] / found[f"unshared {name}"]
            for name in ("step_ms", "forward_ms", "kept_gib", "peak_gib")
            if f"shared {name}" in found
        }
        ratios |= {"tokens": row.case.tokens_ratio, "pairs": row.case.pairs_ratio}
        return ratios | found | {"difference": max(row.differences.values())}


@dataclass(frozen=True)
class Pack:
    """What is computed of a pack.

    Attributes:
        repeated: Forward and backward.
        gradients: Of the last backward, by name, given what it returned: of tokens, and of weights.
    """

    repeated: Repeated
    gradients: Callable[[Any], tuple[dict[str, Tensor], dict[str, Tensor]]]


class PrefixBenchmark(kit.Benchmark):
    """Both packs of every case in turns."""

    files = "shared_prefix"
    report = PrefixReport
    options = kit.declare(
        "folder render only device heads=128,16 time_limit=90 seed=1234",
        works=kit.some("what to measure, separated by semicolons", WORKS, separator=";"),
        prompt=kit.number("tokens of the prompt", 8192),
        answers=kit.number("answers to it", 16),
        answer=kit.number("tokens of an answer", 1024),
        rounds=kit.number("steps of each pack that are timed", 3),
        recompute=kit.one(
            "module that layers recompute in backward", ("none", "mla_up_proj"), "mla_up_proj"
        ),
        backend=kit.one("core_attention_backend", CORE_ATTENTION_BACKENDS, "auto"),
        ffn_hidden_size=kit.number("width of the dense MLP", 18432),
        dims=kit.DIMS,
    )
    quick = "--prompt 24 --answers 4 --answer 8 --rounds 1 --ffn-hidden-size 64"
    recorded = ("dims", "recompute", "backend", "ffn_hidden_size", "ceilings")

    def cases(self) -> list[PrefixCase]:
        """Of every work; the transformer layer with the largest number of heads only."""
        args, found = self.args, []
        for work in args.works:
            heads = [max(args.heads)] if work == "transformer layer" else args.heads
            for count in heads:
                case = PrefixCase(work, count, args.prompt, args.answers, args.answer)
                while work.startswith(CORE) and self._too_large(case):
                    case = replace(case, prompt=case.prompt // 2, answer=case.answer // 2)
                found.append(case)
        return found

    def _too_large(self, case: PrefixCase) -> bool:
        fits = attention_bytes(case, kit.dims_of(self.args)) <= MOST_BYTES
        return not fits and min(case.prompt, case.answer) > 1

    def measure(self, case: PrefixCase) -> Row:
        """Both packs, compared first.

        Raises:
            Refused: If it cannot run here.
            ArithmeticError: If they differ.
        """
        from absorbed_mla.prefix_tree import PrefixTree
        from benchmarks.kit.timing import in_turns

        tree = PrefixTree.of_groups([(case.prompt, [case.answer] * case.answers)])
        build = self.core if case.work.startswith(CORE) else self.layer
        shared, unshared, ran = build(case, tree)
        differences = compare(tree, unshared, shared)
        limit = MOST_DIFFERENCE[self.processes.device.type]
        for name, found in differences.items():
            # Not a number is no agreement either.
            if not found <= limit:
                raise ArithmeticError(f"{name} of the packs differ by {found:.3g}, over {limit:g}")
        works = [one.repeated for one in (shared, unshared)]
        bytes_of = [self._memory(work) for work in works]
        turns = in_turns(works, self.args.rounds)
        packs = {}
        for name, times, memory in zip(PACKS, turns, bytes_of):
            forward, _, step = (kit.Times.of(one) for one in zip(*times))
            packs[name] = Measured(forward, step, *memory)
        return Row(case=case, differences=differences, ran=str(ran), **packs)

    def core(self, case: PrefixCase, tree: PrefixTree) -> tuple[Pack, Pack, str]:
        """Attention alone of both packs, and the backend."""
        from absorbed_mla.core_attention.masks.spans import self_attention_spans
        from absorbed_mla.core_attention.types import AttentionInputs
        from absorbed_mla.sequences import SequenceLayout
        from benchmarks.kit.timing import Repeated

        dims, processes, form = kit.dims_of(self.args), self.processes, case.work[len(CORE) :]
        layouts = (
            SequenceLayout.from_host(tree.packed_seq_params(), tree.num_tokens),
            SequenceLayout.pack(tree.sequence_lengths),
        )
        core = CoreCase("ours", form, case.heads, tree.num_tokens)
        inputs = core_attention.random_inputs(core, dims, processes)
        width = pair_widths(form, dims)[1]
        grad = processes.random(tree.num_tokens, 1, case.heads, width)
        rows = tree.expand().to(processes.device)
        given = (
            (inputs, grad),
            (
                AttentionInputs(*(x if x is None or not len(x) else x[rows] for x in inputs)),
                share(tree, grad),
            ),
        )

        def pack(layout: SequenceLayout, inputs: AttentionInputs, grad: Tensor):
            spans = self_attention_spans(layout, causal=True)
            ours = core_attention.our_attention(self.args.backend, form, dims, inputs, grad, spans)

            def gradients(found: AttentionInputs):
                named = found._asdict().items()
                return {name: x for name, x in named if x is not None and x.numel()}, {}

            on_gpu = processes.on_gpu
            return Pack(Repeated(ours.forward, ours.backward, on_gpu=on_gpu), gradients), ours.ran

        (shared, ran), (unshared, _) = (pack(one, *more) for one, more in zip(layouts, given))
        return shared, unshared, ran

    def layer(self, case: PrefixCase, tree: PrefixTree) -> tuple[Pack, Pack, Any]:
        """A layer on both packs, and the form and backends that it takes."""
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers
        from benchmarks.kit.chosen_backends import ChosenBackends
        from benchmarks.kit.timing import Repeated

        args, processes = self.args, self.processes
        recompute = None if args.recompute == "none" else args.recompute
        config = layers.layer_config(args, processes, heads=case.heads, recompute=recompute)
        config.ffn_hidden_size, config.gated_linear_unit = args.ffn_hidden_size, True
        config.activation_func = torch.nn.functional.silu
        # One product of gate and value is kept less.
        config.bias_activation_fusion = processes.on_gpu
        options = AbsorbedMLAOptions(core_attention_backend=args.backend)
        params, whole = tree.packed_seq_params(processes.device), case.work == "transformer layer"
        subject = layers.build(config, options, processes, tree.num_tokens, params, whole)
        ran = ChosenBackends(subject.layer)
        rows = tree.expand().to(processes.device)
        other = replace(
            subject,
            x=subject.x.detach()[rows].requires_grad_(),
            output_grad=share(tree, subject.output_grad),
            packed=layers.pack(tree.sequence_lengths, processes.device),
        )

        def pack(subject: Subject) -> Pack:
            def gradients(_: None):
                weights = subject.layer.named_parameters()
                return {"x": subject.x.grad}, {name: w.grad for name, w in weights}

            finish = {"finish": subject.forget_gradients, "on_gpu": processes.on_gpu}
            return Pack(Repeated(subject.forward, subject.backward, **finish), gradients)

        return pack(subject), pack(other), ran

    def _memory(self, work: Repeated) -> tuple[int | None, int | None]:
        """Bytes that forward keeps, and the most of a step; None without a GPU."""
        if not self.processes.on_gpu:
            return None, None
        self.processes.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = work.forward()
        kept = torch.cuda.memory_allocated() - before
        work.backward(result)
        peak = torch.cuda.max_memory_allocated() - before
        work.finish()
        return kept, peak


def share(tree: PrefixTree, grad: Tensor) -> Tensor:
    """A gradient of the pack without shared prefixes whose copies add up to ``grad`` [T, ...]."""
    rows = tree.expand().to(grad.device)
    counts = tree.token_counts().to(grad)[rows]
    return grad[rows].div_(counts.view(-1, *[1] * (grad.ndim - 1)))


def compare(tree: PrefixTree, unshared: Pack, shared: Pack) -> dict[str, float]:
    """How far the shared pack's output and gradients are from the other's, by name."""

    def run(pack: Pack):
        result = pack.repeated.forward()
        out = (result if isinstance(result, torch.Tensor) else result[0]).detach()
        gradients = pack.gradients(pack.repeated.backward(result))
        pack.repeated.finish()
        return out, *gradients

    whole, by_token, by_weight = run(unshared)
    # One at a time, since they are large.
    for name in list(by_token):
        by_token[name] = _summed(tree, by_token[name])
    out, own_by_token, own_by_weight = run(shared)
    rows = [one.to(out.device) for one in map(tree.rows, tree.ends)]
    parts = zip(rows, whole.split(tree.sequence_lengths))
    found = {"outputs": max(_difference(out[one], part) for one, part in parts)}
    for ours, theirs in ((own_by_token, by_token), (own_by_weight, by_weight)):
        gradients = {
            f"gradients of {name}": _difference(ours[name], x) for name, x in theirs.items()
        }
        found |= gradients
    return found


def _summed(tree: PrefixTree, x: Tensor) -> Tensor:
    """Sums over copies of tokens, [T, ...] in fp32."""
    total = x.new_zeros(tree.num_tokens, *x.shape[1:], dtype=torch.float32)
    for node, part in zip(tree.ends, x.split(tree.sequence_lengths)):
        total.index_add_(0, tree.rows(node).to(x.device), part.float())
    return total


def _difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.float()
    return float((ours - theirs).norm() / theirs.norm())


if __name__ == "__main__":
    kit.main(PrefixBenchmark)
