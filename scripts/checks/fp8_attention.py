#!/usr/bin/env python3
# ruff: noqa: D103, E402, E501  an experiment, taken out again
"""Emulate attention whose products take e4m3 operands, beside bf16 and fp64, on a CPU.

    fp8_attention.py core JSON [--trained FILE] [--only CASE]   errors of the attention itself
    fp8_attention.py layer JSON                     errors of the layer, in cases of the oracle's grid
    fp8_attention.py train SCHEME [--keep FILE] -- OPTIONS OF train.py     training losses

Operands are rounded to values of the narrow type, products of them are exact but for fp32 sums
(Hopper's FP8 products sum less exactly). Gradients are named by their tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

import torch
import torch.nn.functional as F
from torch import Tensor

from absorbed_mla.core_attention.backends.reference import (
    ReferenceBackend,
    reference_backward,
    reference_forward,
)
from absorbed_mla.core_attention.masks.scores import ScoreRules
from absorbed_mla.core_attention.masks.spans import Span, Spans
from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

# Rows and columns of the tiles that have a scale of their own; None: all. Of an operand whose rows
# are tokens and whose columns are summed, and of one whose rows are summed.
SCALES = {
    "tensor": ((None, None), (None, None)),
    "head": ((None, None), (None, None)),
    "block128": ((128, None), (128, None)),
    "block64": ((64, None), (64, None)),
    "token": ((1, None), (64, 1)),
    "finest": ((1, 64), (64, 1)),
}


@dataclass(frozen=True)
class Scheme:
    """How operands are rounded: bf16, e4m3, int8, or e4m3 twice (split: high and low part)."""

    q: str = "bf16"
    k: str = "bf16"
    p: str = "bf16"
    v: str = "bf16"
    scales: str = "token"
    hadamard: bool = False
    smooth: bool = False
    rounded_sum: bool = False
    # Of all operands of the five products; None: bf16.
    backward: str | None = None
    # Whether backward has LSE and output of a forward in bf16.
    own_forward: bool = False


def every(how: str, **more) -> Scheme:
    return Scheme(how, how, how, how, **more)


ONE = {
    f"only {x} in e4m3": replace(Scheme(scales="finest"), **{x: "e4m3"})
    for x in ("q", "k", "p", "v")
}
SCHEMES = {
    "bf16": Scheme(),
    **{f"e4m3, scales by {s}": every("e4m3", scales=s) for s in SCALES},
    "e4m3, token, Hadamard": every("e4m3", hadamard=True),
    "e4m3, token, means taken off": every("e4m3", smooth=True),
    "e4m3, token, means off, Hadamard": every("e4m3", smooth=True, hadamard=True),
    "e4m3, token, sum of rounded p": every("e4m3", rounded_sum=True),
    "e4m3, block128, sum of rounded p": every("e4m3", scales="block128", rounded_sum=True),
    "qk e4m3, pv bf16": Scheme("e4m3", "e4m3"),
    "qk bf16, pv e4m3": Scheme(p="e4m3", v="e4m3"),
    **ONE,
    "int8, means off, Hadamard": every("int8", smooth=True, hadamard=True),
    "qk int8, pv bf16": Scheme("int8", "int8", smooth=True, hadamard=True),
    "split, 3 products each": every("split"),
    "e4m3, backward with bf16's output": every("e4m3", own_forward=True),
    "e4m3, backward e4m3, block128": every("e4m3", scales="block128", backward="e4m3"),
    "e4m3, backward e4m3, finest": every("e4m3", scales="finest", backward="e4m3"),
    "split, backward split": every("split", backward="split"),
}


def largest(x: Tensor, tile: tuple[int | None, int | None]) -> Tensor:
    """The largest magnitude of each tile of the last two dims, for every element."""
    rows, columns = x.shape[-2:]
    r, c = (given or whole for given, whole in zip(tile, (rows, columns)))
    padded = F.pad(x.abs(), (0, -columns % c, 0, -rows % r))
    found = padded.unflatten(-2, (-1, r)).unflatten(-1, (-1, c)).amax((-3, -1))
    found = found.repeat_interleave(r, -2)[..., :rows, :]
    return found.repeat_interleave(c, -1)[..., :columns]


def narrow(x: Tensor, how: str, size: Tensor) -> Tensor:
    """``x`` rounded to e4m3 or int8, whose greatest value is ``size``."""
    size = size.clamp(min=1e-30)
    if how == "int8":
        return (x * (127 / size)).round() * (size / 127)
    return (x * (448 / size)).to(torch.float8_e4m3fn).float() * (size / 448)


def rounded(x: Tensor, how: str, scales: str, summed: int) -> tuple[Tensor, Tensor | None]:
    """High and low part of an operand [B, N, R, D] whose dim ``summed`` a product sums."""
    if how == "bf16":
        return x.bfloat16().float(), None
    size = x.abs().amax() if scales == "tensor" else largest(x, SCALES[scales][summed == -2])
    kind = "int8" if how == "int8" else "e4m3"
    high = narrow(x, kind, size)
    if how != "split":
        return high, None
    rest = x - high
    return high, narrow(rest, kind, largest(rest, SCALES["token"][summed == -2]))


def product(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None]) -> Tensor:
    """A [.., M, D] and b [.., D, N]; of two parts each without that of the low ones."""
    (a, a_low), (b, b_low) = a, b
    if a_low is None:
        return a @ b
    return (a + a_low) @ (b + b_low) - a_low @ b_low


def turned(parts: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return tuple(None if x is None else x.transpose(-1, -2) for x in parts)


def hadamard(x: Tensor) -> Tensor:
    """The last dim, in parts of powers of two, by a Hadamard matrix of random signs each."""
    parts, signs = [], torch.Generator().manual_seed(0)
    for part in x.split([1 << n for n in reversed(range(12)) if x.shape[-1] >> n & 1], -1):
        matrix = torch.ones(1, 1)
        while len(matrix) < part.shape[-1]:
            matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
        sign = torch.randint(0, 2, (len(matrix), 1), generator=signs) * 2.0 - 1
        parts.append(part @ (sign * matrix / len(matrix) ** 0.5))
    return torch.cat(parts, -1)


def heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3).float()


def scores(scheme: Scheme, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled scores [B, N, Q, K] as forward computes them, and what an LSE of them lacks."""
    shift = q.new_zeros(q.shape[:3])
    if scheme.smooth:
        mean = k.mean(2, keepdim=True)
        shift = (q * mean).sum(-1) * scale
        k = k - mean
    if scheme.hadamard:
        q, k = hadamard(q), hadamard(k)
    left = rounded(q, scheme.q, scheme.scales, -1)
    return product(left, turned(rounded(k, scheme.k, scheme.scales, -1))) * scale, shift


def parts(rules: ScoreRules):
    """The spans, and what each hides."""
    for span in rules.spans:
        hidden = torch.zeros(span.num_queries, span.num_keys, dtype=torch.bool)
        if span.causal_offset is not None:
            hidden = ~hidden.logical_not_().tril_(span.causal_offset)
        yield span.queries, span.keys, hidden


def forward(scheme: Scheme, inputs: AttentionInputs, rules: ScoreRules) -> AttentionOutput:
    """As a kernel does it: probabilities are rounded while their row's largest is 1."""
    q, k, v = map(heads_first, inputs.as_multi_head())
    all_scores, shift = scores(scheme, q, k, rules.scale)
    mean = v.mean(2, keepdim=True) if scheme.smooth else v.new_zeros(1)
    value = v - mean
    if scheme.hadamard and scheme.v != "bf16":
        value = hadamard(value)
    value = rounded(value, scheme.v, scheme.scales, -2)
    out, lse = v.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -math.inf)
    for rows, keys, hidden in parts(rules):
        s = all_scores[:, :, rows, keys].masked_fill(hidden, -math.inf)
        top = s.amax(-1, keepdim=True)
        p = (s - top).exp()
        if scheme.scales == "finest" or scheme.p in ("bf16", "int8"):
            p_parts = rounded(p, scheme.p, "finest", -1)
        else:
            high = narrow(p, "e4m3", torch.ones(()))
            low = narrow(p - high, "e4m3", torch.full((), 2.0**-4))
            p_parts = high, low if scheme.p == "split" else None
        total = (p_parts[0] if scheme.rounded_sum else p).sum(-1, keepdim=True)
        value_parts = tuple(None if x is None else x[:, :, keys] for x in value)
        out[:, :, rows] = product(p_parts, value_parts) / total
        lse[:, :, rows] = (top + total.log())[..., 0]
    if scheme.hadamard and scheme.v != "bf16":
        out = turned_back(out)
    out = (out + mean).permute(2, 0, 1, 3)
    return AttentionOutput(out.to(inputs.value.dtype).float(), (lse + shift).permute(2, 0, 1))


def turned_back(x: Tensor) -> Tensor:
    """The inverse of :func:`hadamard`."""
    return x @ hadamard(torch.eye(x.shape[-1])).T


def backward(scheme: Scheme, grad, output, inputs, rules) -> AttentionInputs:
    """Five products of rounded operands; scores again as in forward if they are narrow ones."""
    q, k, v = map(heads_first, inputs.as_multi_head())
    do, out = heads_first(grad.out), heads_first(output.out)
    how = scheme.backward or "bf16"
    scored, shift = scores(scheme if scheme.backward else Scheme(), q, k, rules.scale)
    lse = output.lse.permute(1, 2, 0) - shift
    delta = (do * out).sum(-1, keepdim=True)
    if grad.lse is not None:
        delta = delta - grad.lse.permute(1, 2, 0)[..., None]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))

    def both(a: Tensor, b: Tensor) -> Tensor:
        first = rounded(a, how, scheme.scales, -1)
        return product(first, rounded(b, how, scheme.scales, -2))

    for rows, keys, hidden in parts(rules):
        p = (scored[:, :, rows, keys] - lse[:, :, rows, None]).exp().masked_fill(hidden, 0)
        dp = both(do[:, :, rows], v[:, :, keys].transpose(-1, -2))
        ds = p * (dp - delta[:, :, rows]) * rules.scale
        dv[:, :, keys] += both(p.transpose(-1, -2), do[:, :, rows])
        dq[:, :, rows] += both(ds, k[:, :, keys])
        dk[:, :, keys] += both(ds.transpose(-1, -2), q[:, :, rows])
    found = (x.permute(2, 0, 1, 3).to(inputs.q_content.dtype).float() for x in (dq, dk, dv))
    return inputs.multi_head_gradient(*found)


@contextlib.contextmanager
def emulated(scheme: Scheme, record: list | None = None):
    """Layers attend so; ``record`` gets what every backward was given."""
    kept = ReferenceBackend.forward, ReferenceBackend.backward

    def step_back(grad, output, inputs, rules):
        if record is not None:
            record[:] = [*record[-7:], (*inputs.as_multi_head(), grad.out, rules.scale)]
        return backward(scheme, grad, output, inputs, rules)

    ReferenceBackend.forward = staticmethod(lambda *given: forward(scheme, *given))
    ReferenceBackend.backward = staticmethod(step_back)
    try:
        yield
    finally:
        ReferenceBackend.forward, ReferenceBackend.backward = map(staticmethod, kept)


def normal(heads: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value and gradient [S, 1, N, D] in bf16."""
    generator = torch.Generator().manual_seed(seed)
    widths = (192, 192, 128, 128)
    return [torch.randn(tokens, 1, heads, w, generator=generator).bfloat16() for w in widths]


def cases(trained: str | None):
    """Name, tensors, rules."""

    def rules(*lengths, scale=192**-0.5):
        ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
        return ScoreRules(scale, Spans(Span(e - n, e, e - n, e, 0) for n, e in zip(lengths, ends)))

    yield "normal, 16 heads, 512", normal(16, 512), rules(512)
    yield "normal, 4 heads, 2048", normal(4, 2048), rules(2048)
    yield "normal, 128 heads, 512", normal(128, 512), rules(512)
    yield "normal, 16 heads, pack", normal(16, 1024), rules(700, 100, 3, 221)
    q, k, v, do = normal(16, 1024)
    yield "peaked: scores of deviation 4", [q * 4, k, v, do], rules(1024)
    large = k.clone()
    large[..., [3, 40, 77, 150]] = large[..., [3, 40, 77, 150]] * 2 + 10
    yield "keys with 4 channels of mean 10", [q, large, v, do], rules(1024)
    channels = torch.ones(192)
    channels[[3, 40, 77, 150]] = 10
    yield "keys with 4 channels of deviation 10", [q, k * channels.bfloat16(), v, do], rules(1024)
    if trained:
        for name, (*tensors, scale) in torch.load(trained).items():
            yield name, tensors, rules(len(tensors[0]), scale=scale)


def errors(found, truth) -> dict[str, tuple[float, float]]:
    """Of each tensor: relative Frobenius error, and the largest over the largest magnitude."""
    result = {}
    for name, (a, b) in zip(("o", "dq", "dk", "dv"), zip(found, truth)):
        gap = a.double() - b
        result[name] = ((gap.norm() / b.norm()).item(), (gap.abs().max() / b.abs().max()).item())
    return result


def core(target: str, trained: str | None, only: str | None) -> None:
    rows = []
    for case, (q, k, v, do), rules in cases(trained):
        if only and only not in case:
            continue
        exact = AttentionInputs.multi_head(*(x.double() for x in (q, k, v)))
        output = reference_forward(exact, rules)
        grads = reference_backward(OutputGradient(do.double(), None), output, exact, rules)
        truth = output.out, grads.q_content, grads.k_content, grads.value
        inputs, plain = AttentionInputs.multi_head(q, k, v), None
        for name, scheme in SCHEMES.items():
            started = time.time()
            found = forward(scheme, inputs, rules)
            given = plain if scheme.own_forward else found
            dq, _, dk, _, dv = backward(scheme, OutputGradient(do, None), given, inputs, rules)
            plain = plain or found
            row = errors((found.out, dq, dk, dv), truth)
            row = {
                "case": case,
                "scheme": name,
                "errors": row,
                "lse": (found.lse.double() - output.lse).abs().max().item(),
            }
            base = rows[-1]["base"] if rows and rows[-1]["case"] == case else row["errors"]
            ratios = {t: [a / b for a, b in zip(e, base[t])] for t, e in row["errors"].items()}
            rows.append({**row, "ratios": ratios, "base": base})
            shown = " ".join(f"{t} {r[0]:.1f}/{r[1]:.1f}" for t, r in ratios.items())
            print(f"{case} | {name} | {shown} | {time.time() - started:.0f} s", flush=True)
            kept = [{n: x for n, x in one.items() if n != "base"} for one in rows]
            Path(target).write_text(json.dumps(kept) + "\n")


def layer(target: str) -> None:
    """Errors of cases of the oracle's grid by scheme, of output and every gradient."""
    from tests.oracle import OracleMLA
    from tests.support.cases import TINY, WIDE
    from tests.support.execution import execute
    from tests.support.harness import Setup
    from tests.support.layouts import dense, grid_layout, packed
    from tests.support.numerics import relative_error

    sizes = {"hidden": 512, "q_lora_rank": 256, "kv_lora_rank": 256, "norm_eps": 1e-6}
    real = OracleMLA(**sizes, heads=16, nope=128, rope=64, v=128)
    grid = {
        **{
            f"TINY, {n}": (TINY, grid_layout(n, divisible=False))
            for n in ("sbhd", "thd", "thd_padded")
        },
        "WIDE, sbhd": (WIDE, grid_layout("sbhd", divisible=False)),
        "192/128, 16 heads, 512 tokens": (real, dense(512, 1)),
        "192/128, 16 heads, pack of 512": (real, packed((300, 150, 1, 61))),
    }
    names = (
        "bf16",
        "e4m3, scales by block128",
        "e4m3, scales by finest",
        "qk bf16, pv e4m3",
        "qk e4m3, pv bf16",
        "e4m3, backward e4m3, finest",
    )
    rows = []
    for case, (mla, tokens) in grid.items():
        base: dict[str, float] = {}
        for name in names:
            setup = Setup(
                form="expanded",
                dtype=torch.bfloat16,
                query_chunk_size=4096,
                expansion_chunk_size=1 << 20,
            )
            with emulated(SCHEMES[name]):
                run = execute(mla, setup, tokens)
            table = run.table()
            truth, bounds = run.oracle(table), run.bounds(table)
            found = {n: relative_error(t, truth[n]) for n, t in run.tensors.items()}
            base = base or found
            over = {n: e / bounds[n] for n, e in found.items()}
            ratio = {n: e / base[n] for n, e in found.items()}
            rows.append(
                {"case": case, "scheme": name, "errors": found, "ratios": ratio, "of bound": over}
            )
            worst = max(ratio, key=ratio.get)
            print(
                f"{case} | {name} | {worst} {ratio[worst]:.1f}, output {ratio['output']:.1f}, of the bound {max(over.values()):.2f}",
                flush=True,
            )
            Path(target).write_text(json.dumps(rows) + "\n")


def train(scheme: str, keep: str | None, options: list[str]) -> None:
    from training.entry import run

    record: list = []
    with emulated(SCHEMES[scheme], record):
        run(options)
    if keep:
        # Backward goes from the last layer to the first; two sequences of each.
        kept = {}
        for n, (*tensors, scale) in enumerate(reversed(record[-3:])):
            kept[f"trained, layer {n + 1}"] = [x[:, :2].clone() for x in tensors] + [scale]
        torch.save(kept, keep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("core", "layer", "train"))
    parser.add_argument("target")
    parser.add_argument("--trained")
    parser.add_argument("--only")
    parser.add_argument("--keep")
    words = sys.argv[1:]
    own, rest = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    args = parser.parse_args(own)
    if args.what == "core":
        with torch.no_grad():
            core(args.target, args.trained, args.only)
    elif args.what == "layer":
        from absorbed_mla.cpu_host import enable_cpu_host
        from tests.support import world

        enable_cpu_host()
        world.start()
        layer(args.target)
    else:
        train(args.target, args.keep, rest)


if __name__ == "__main__":
    main()
