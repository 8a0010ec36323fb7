#!/usr/bin/env python3
"""Measure training on a pack in which a group's prompt stands once, beside a pack without that.

    $ python scripts/benchmarks/shared_prefix.py docs/measurements/shared-prefix
    $ python scripts/benchmarks/shared_prefix.py /tmp/core --only "attention alone" --heads 16
    $ python scripts/benchmarks/shared_prefix.py RESULTS --render one.json other.json

Both packs hold the same answers to one prompt, in the pack without shared prefixes each behind a
copy of it. They are computed in turns, with the same weights, after outputs and gradients of one
have been compared with the other's ("difference" is the largest, of Frobenius norms). Attention
alone has no projections; layers are DeepSeek-V3's, the transformer layer with its dense MLP.

"step" is forward and backward, of the shared pack over that of the other one, as are "forward",
"kept" (memory allocated by forward until backward) and "peak"; "tokens" and "pairs" are what these
can reach where time goes by tokens, or by pairs of a query and a key. Where attention alone of the
pack without shared prefixes needs more than 70 GB by arithmetic, prompt and answers are halved,
which leaves "tokens" and "pairs" as they are. Output:

    12.3 s  attention layer n=128 8192+16x1024 (expanded, hopper_expanded): step 0.24, forward 0.25
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import core_attention, kit
from benchmarks.core_attention import CoreCase, pair_widths
from benchmarks.kit.tables import gibibytes

if TYPE_CHECKING:
    from torch import Tensor

    from absorbed_mla.prefix_tree import PrefixTree

torch: Any = kit.lazy("torch")
CORE = "attention alone, "
# The most important ones first, because --time-limit leaves out the last ones.
WORKS = (CORE + "expanded", "attention layer", "transformer layer", CORE + "absorbed")
_MOST_BYTES = 70e9
# Between the packs: what sums in another order leave in bf16 and fp32.
_MOST_DIFFERENCE = {"cuda": 2e-2, "cpu": 1e-4}


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
        """By what is computed."""
        return self.work

    def least(self) -> dict[str, float]:
        """Tokens, and pairs of a query and a key, of the shared pack over the other's."""
        prompt, answers, answer = self.prompt, self.answers, self.answer
        tokens = (prompt + answers * answer) / (answers * (prompt + answer))
        before, whole = (n * (n + 1) / 2 for n in (prompt, prompt + answer))
        pairs = (before + answers * (whole - before)) / (answers * whole)
        return {"tokens": tokens, "pairs": pairs}

    def fitting(self, dims: dict[str, int]) -> PrefixCase:
        """Halved until attention alone of the pack without shared prefixes fits."""
        key, value = pair_widths(self.work.removeprefix(CORE), dims)
        # In bf16: query, output, both gradients, that of the query in fp32, too; keys and values.
        numbers = 4 * key + 2 * value + (2 * (key + value) if "expanded" in self.work else 0)
        tokens = self.answers * (self.prompt + self.answer)
        if 2 * numbers * self.heads * tokens <= _MOST_BYTES:
            return self
        return replace(self, prompt=self.prompt // 2, answer=self.answer // 2).fitting(dims)


class PrefixReport(kit.Report):
    """One run; ratios are of the shared pack to the other one."""

    row, case = kit.RanRow, PrefixCase
    plotted = tuple(
        (f"{name} of the unshared pack's, {{0.answers}} answers", name, "heads")
        for name in ("step", "forward", "kept", "peak")
    )


class Core:
    """Attention alone on a pack, with the methods of ``kit.layers.Subject``."""

    def __init__(self, attention: core_attention.Attention) -> None:
        self.forward, self._backward = attention.forward, attention.backward
        self.gradients: dict[str, Tensor] = {}

    def backward(self, output: Any) -> None:
        """Gradients of the inputs."""
        found = self._backward(output)._asdict().items()
        self.gradients = {name: x for name, x in found if x is not None and x.numel()}

    def forget_gradients(self) -> None:
        """Free them."""
        self.gradients = {}


class PrefixBenchmark(kit.Benchmark):
    """Both packs of every case in turns."""

    files = "shared_prefix"
    report = PrefixReport
    options = kit.declare(
        "folder render only device heads=128,16 time_limit=90 seed=1234",
        prompt=kit.number("tokens of the prompt", 8192),
        answers=kit.number("answers to it", 16),
        answer=kit.number("tokens of an answer", 1024),
        rounds=kit.number("steps of each pack that are timed", 3),
        ffn_hidden_size=kit.number("width of the dense MLP", 18432),
        dims=kit.DIMS,
    )
    quick = "--prompt 24 --answers 4 --answer 8 --rounds 1 --ffn-hidden-size 64"
    recorded = ("dims", "ffn_hidden_size", "ceilings")

    def cases(self) -> list[PrefixCase]:
        """Of every work; the transformer layer with the largest number of heads only."""
        args, found = self.args, []
        for work in WORKS:
            for heads in [max(args.heads)] if work == "transformer layer" else args.heads:
                case = PrefixCase(work, heads, args.prompt, args.answers, args.answer)
                found.append(case.fitting(kit.dims_of(args)) if work.startswith(CORE) else case)
        return found

    def measure(self, case: PrefixCase) -> kit.RanRow:
        """Both packs, compared first.

        Raises:
            Refused: If it cannot run here.
            ArithmeticError: If they differ.
        """
        from absorbed_mla.prefix_tree import PrefixTree
        from benchmarks.kit.layers import observe
        from benchmarks.kit.timing import Repeated, medians_in_turns

        processes = self.processes
        tree = PrefixTree.of_groups([(case.prompt, [case.answer] * case.answers)])
        build = self.core if case.work.startswith(CORE) else self.layer
        *packs, ran = build(case, tree)
        difference = compare(tree, *packs)
        if not difference <= _MOST_DIFFERENCE[processes.device.type]:
            raise ArithmeticError(f"the packs differ by {difference:.3g}")
        works = [Repeated.of(pack, on_gpu=processes.on_gpu) for pack in packs]
        memory = [gibibytes(observe(pack, processes)) for pack in packs]
        times = medians_in_turns(works, self.args.rounds)
        shared, unshared = (one | own for one, own in zip(times, memory))
        more = {name.partition("_")[0]: x / unshared[name] for name, x in shared.items()}
        more |= case.least() | {f"shared {name}": x for name, x in shared.items()}
        more |= {f"unshared {name}": x for name, x in unshared.items()}
        return kit.RanRow(case=case, more=more | {"difference": difference}, ran=str(ran))

    def core(self, case: PrefixCase, tree: PrefixTree) -> tuple[Core, Core, str]:
        """Attention alone of both packs, and the backend."""
        from absorbed_mla.core_attention.masks.spans import self_attention_spans
        from absorbed_mla.core_attention.types import AttentionInputs
        from absorbed_mla.sequences import SequenceLayout

        dims, processes, form = kit.dims_of(self.args), self.processes, case.work[len(CORE) :]
        core = CoreCase("ours", form, case.heads, tree.num_tokens)
        inputs = core_attention.random_inputs(core, dims, processes)
        grad = processes.random(tree.num_tokens, 1, case.heads, pair_widths(form, dims)[1])
        rows = tree.expand().to(processes.device)
        copies = AttentionInputs(*(x if x is None or not len(x) else x[rows] for x in inputs))
        shared = SequenceLayout.from_host(tree.packed_seq_params(), tree.num_tokens)
        found = [
            core_attention.our_attention(
                "auto", form, dims, *given, self_attention_spans(layout, causal=True)
            )
            for layout, *given in (
                (shared, inputs, grad),
                (SequenceLayout.pack(tree.sequence_lengths), copies, divided(tree, grad)),
            )
        ]
        return *map(Core, found), found[0].ran

    def layer(self, case: PrefixCase, tree: PrefixTree) -> tuple[Any, Any, Any]:
        """A layer on both packs, and the form and backends that it takes."""
        from absorbed_mla import AbsorbedMLAOptions
        from benchmarks.kit import layers
        from benchmarks.kit.chosen_backends import ChosenBackends

        args, processes = self.args, self.processes
        config = layers.layer_config(args, processes, heads=case.heads, recompute="mla_up_proj")
        config.ffn_hidden_size, config.gated_linear_unit = args.ffn_hidden_size, True
        config.activation_func = torch.nn.functional.silu
        # Less is kept.
        config.bias_activation_fusion = processes.on_gpu
        params, whole = tree.packed_seq_params(processes.device), case.work == "transformer layer"
        shared = layers.build(
            config, AbsorbedMLAOptions(), processes, tree.num_tokens, params, whole
        )
        unshared = replace(
            shared,
            x=shared.x.detach()[tree.expand().to(processes.device)].requires_grad_(),
            output_grad=divided(tree, shared.output_grad),
            packed=layers.pack(tree.sequence_lengths, processes.device),
        )
        return shared, unshared, ChosenBackends(shared.layer)


def divided(tree: PrefixTree, grad: Tensor) -> Tensor:
    """A gradient of the pack without shared prefixes whose copies add up to ``grad`` [T, ...]."""
    rows = tree.expand().to(grad.device)
    counts = tree.token_counts().to(grad)[rows]
    return grad[rows].div_(counts.view(-1, *[1] * (grad.ndim - 1)))


def compare(tree: PrefixTree, shared: Any, unshared: Any) -> float:
    """The largest difference of outputs and gradients; NaN if one has any."""
    (out, own), (copies, others) = run(tree, shared), run(tree, unshared)
    copies = copies.split(tree.sequence_lengths)
    pairs = [(out[_rows(tree, node, out)], one) for node, one in zip(tree.ends, copies)]
    pairs += [(own[name], others[name]) for name in others]
    return float(torch.stack([_difference(*pair) for pair in pairs]).max())


def run(tree: PrefixTree, pack: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of a pack, and gradients by name, summed over copies of tokens."""
    result = pack.forward()
    out = (result[0] if isinstance(pack, Core) else result).detach()
    pack.backward(result)
    weights: dict[str, Tensor] = {}
    if isinstance(pack, Core):
        of_tokens = dict(pack.gradients)
    else:
        of_tokens = {"x": pack.x.grad}
        weights = {name: weight.grad for name, weight in pack.layer.named_parameters()}
    pack.forget_gradients()
    if len(out) != tree.num_tokens:
        # One at a time, since they are large.
        for name in of_tokens:
            of_tokens[name] = _summed(tree, of_tokens[name])
    return out, of_tokens | weights


def _summed(tree: PrefixTree, x: Tensor) -> Tensor:
    """Sums over copies of tokens, [T, ...] in fp32."""
    total = x.new_zeros(tree.num_tokens, *x.shape[1:], dtype=torch.float32)
    for node, part in zip(tree.ends, x.split(tree.sequence_lengths)):
        total.index_add_(0, _rows(tree, node, x), part.float())
    return total


def _rows(tree: PrefixTree, node: int, like: Tensor) -> Tensor:
    return tree.rows(node).to(like.device)


def _difference(ours: Tensor, theirs: Tensor) -> Tensor:
    ours, theirs = ours.float(), theirs.float()
    return (ours - theirs).norm() / theirs.norm()


if __name__ == "__main__":
    kit.main(PrefixBenchmark)
