#!/usr/bin/env python3
"""Find out whether the cuDNN that TransformerEngine loads gives right gradients for packs.

    $ python scripts/checks/check_cudnn_packed_gradients.py docs/megatron
    $ python scripts/checks/check_cudnn_packed_gradients.py docs/megatron --render one.json two.json

Megatron's standard MLA pads its values from 128 to 192 numbers in packs, and cuDNN 9.14 computes
wrong gradients for values that wide. This builds Megatron's MLASelfAttention of TransformerEngine's
layers and ours with the same weights, runs both forwards and backwards on one sequence and on packs
of 1, 2 and 5 documents, and compares output, input gradient and the gradient of every parameter
with a float64 evaluation of the equations; then TransformerEngine's attention alone, by the widths
of its heads. It needs a GPU and TransformerEngine, and takes about a minute. The exit code is 1 if
ours is off, and 0 otherwise, whatever Megatron's gradients are; 2 after wrong input. To try another
cuDNN, let CUDNN_HOME, CUDNN_PATH and LD_LIBRARY_PATH point at it (docs/megatron.md).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.attention import only_fused
from benchmarks.kit import arguments, provenance
from benchmarks.kit.arguments import DIMS, count, dims_of
from benchmarks.kit.report import read_dataclass, read_json, reason, write_json
from benchmarks.kit.tables import Table
from console.parser import Parser
from console.script import run_script

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from absorbed_mla.core_attention.backend import AttentionBackend
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from tests.oracle import OracleMLA, OracleResult
    from tests.support.harness import Setup
    from tests.support.layouts import Layout

NAME = "packed_gradients"
LEAST_TOKENS = 16
MEGATRON = "megatron"
# By the name of the row -> core_attention_backend.
OURS = {"ours": "auto", "ours, transformer_engine": "transformer_engine"}
# Widths of key and value: Megatron pads the value of packs to the key's width.
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 128), (256, 256))
# Where the documents of a pack end, in sixteenths of it.
_PACKS = {1: (16,), 2: (11, 16), 5: (1, 4, 5, 12, 16)}

# ---- command line


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``.

    Raises:
        ValueError: After wrong input.
    """
    parser = Parser("check_cudnn_packed_gradients.py", __doc__)
    arguments.add_folder(parser, f"{NAME}-cudnn-VERSION.json")
    parser.add_argument("--tokens", type=count, default=2048, help="of a sequence or pack")
    parser.add_argument("--heads", type=count, default=16, help="of the layers")
    arguments.add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.tokens < LEAST_TOKENS:
        parser.error(f"--tokens must be at least {LEAST_TOKENS}, got {args.tokens}")
    arguments.check_files(args.folder, args.render)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code."""
    return run_script("check_cudnn_packed_gradients.py", lambda: _run(parse_arguments(argv)))


def _run(args: argparse.Namespace) -> int:
    if args.render:
        show([read(file) for file in args.render])
        return 0
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """Measure, write, print; 1 if ours is off.

    Raises:
        ValueError: If there is no GPU or no TransformerEngine.
    """
    loaded = _require_machine()
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from tests.oracle import OracleMLA
    from tests.support import world

    for file in sorted(_cudnn_files()):
        print(f"cuDNN {loaded}: {file}")
    world.start()
    dims = dims_of(args)
    mla = OracleMLA(
        hidden=dims["hidden-size"],
        heads=args.heads,
        q_lora_rank=dims["q-lora-rank"],
        kv_lora_rank=dims["kv-lora-rank"],
        nope=dims["qk-head-dim"],
        rope=dims["qk-pos-emb-head-dim"],
        v=dims["v-head-dim"],
    )
    found = Findings(_environment(args), [], [])
    for row in measure_layers(mla, args.tokens, torch.bfloat16):
        found.layers.append(row)
        worst = max(row.errors.values(), default=float("nan"))
        print(
            f"{row.implementation}, {row.layout}: {row.error or f'worst {worst:.1e}'}", flush=True
        )
    write(found, args.folder)
    # Last: a kernel's fault takes the device away.
    for width in measure_widths(args.heads, args.tokens, world.device(), torch.bfloat16):
        found.widths.append(width)
    write(found, args.folder)
    show([found])
    world.stop()
    return int(ours_is_off(found))


def _require_machine() -> str:
    """The cuDNN that TransformerEngine loaded.

    Raises:
        ValueError: If there is no GPU or no TransformerEngine.
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("this check needs a GPU that PyTorch can use, and there is none")
    found = provenance.cudnn_of_transformer_engine()
    if not found[0].isdigit():
        raise ValueError(f"this check needs TransformerEngine: {found}")
    return found


def _cudnn_files() -> set[str]:
    """The main library as this process has loaded it, for the terminal alone."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in maps if "/libcudnn.so" in line}


def _environment(args: argparse.Namespace) -> dict:
    sizes = {"tokens": args.tokens, "heads": args.heads, "dims": dims_of(args)}
    return provenance.describe(True, "bfloat16", **sizes)


# ---- what is found


@dataclass(frozen=True)
class LayerRow:
    """One layer on one layout.

    Attributes:
        implementation: Whose layer.
        layout: Name of the layout.
        ran: Form and backend of ours.
        errors: Relative Frobenius error of the output and every gradient, by name.
        bounds: What a plain evaluation of the oracle's equations loses at this precision, three
            times over, by the same names.
        error: Empty, or why there are no figures.
    """

    implementation: str
    layout: str
    ran: str
    errors: dict[str, float]
    bounds: dict[str, float]
    error: str

    @property
    def out_of_bounds(self) -> list[str]:
        """Tensors whose error is above its bound, or not a number."""
        return [name for name, x in self.errors.items() if not x <= self.bounds[name]]


@dataclass(frozen=True)
class WidthRow:
    """TransformerEngine's fused attention alone, as our backend calls it.

    Attributes:
        key_width: Of query and key.
        value_width: Of the value.
        layout: As in TransformerEngine, ``"sbhd"`` or ``"thd"``.
        errors: Relative Frobenius error of the output and of the gradients, by name.
        error: Empty, or why there are no figures.
    """

    key_width: int
    value_width: int
    layout: str
    errors: dict[str, float]
    error: str


@dataclass(frozen=True)
class Findings:
    """One run of the script: one cuDNN.

    Attributes:
        environment: Machine, versions, dimensions.
        layers: Whole layers.
        widths: The attention alone.
    """

    environment: dict
    layers: list[LayerRow]
    widths: list[WidthRow]

    @property
    def cudnn(self) -> str:
        """The version that TransformerEngine loaded."""
        return self.environment["versions"][provenance.CUDNN_OF_TE]


def write(findings: Findings, folder: Path) -> Path:
    """The JSON of one run; runs with another cuDNN are kept beside it."""
    path = folder / f"{NAME}-cudnn-{findings.cudnn}.json"
    write_json(path, asdict(findings))
    return path


def read(path: Path) -> Findings:
    """The inverse of :func:`write`.

    Raises:
        ValueError: If the file is not one of this script's.
    """
    return read_json(path, lambda content: read_dataclass(Findings, content))


# ---- whole layers, Megatron's and ours, on the same weights and the same tokens


def layouts(tokens: int) -> dict[str, Layout]:
    """One sequence, and packs of 1, 2 and 5 documents, by their names."""
    from tests.support.layouts import dense, packed

    found = {"sbhd": dense(tokens, 1)}
    for documents, ends in _PACKS.items():
        bounds = [0, *(tokens * end // 16 for end in ends)]
        lengths = [end - start for start, end in zip(bounds, bounds[1:])]
        found[f"thd, {documents} document{'s' if documents > 1 else ''}"] = packed(lengths)
    return found


def measure_layers(
    mla: OracleMLA,
    tokens: int,
    dtype: torch.dtype,
    layers: str = "transformer_engine",
    only: Callable[[], AbstractContextManager] = only_fused,
) -> Iterator[LayerRow]:
    """Every layer on every layout.

    Args:
        mla: Dimensions.
        tokens: Of each layout.
        dtype: Of weights and activations.
        layers: ``transformer_impl`` of all layers.
        only: What lets TransformerEngine take no attention but cuDNN's.
    """
    import torch

    from tests.support.cases import random_weights
    from tests.support.harness import named_tensors
    from tests.support.numerics import bounds_from_eager, compare

    weights = {n: w.to(dtype).double() for n, w in random_weights(mla).items()}
    for name, layout in layouts(tokens).items():
        x, output_grad = (layout.random_rows(mla.hidden, seed).to(dtype) for seed in (1, 2))
        exact, eager = (
            named_tensors(mla, _evaluate(mla, weights, x, output_grad, layout, precision))
            for precision in (torch.float64, dtype)
        )
        bounds = bounds_from_eager(eager, exact, dtype)
        for implementation in (MEGATRON, *OURS):
            setup = _setup(implementation, dtype, layers)
            try:
                with only() if implementation == MEGATRON else nullcontext():
                    ran, result = _run_layer(
                        implementation, mla, setup, weights, layout, x, output_grad
                    )
            except Exception as error:
                yield LayerRow(implementation, name, "", {}, {}, reason(error))
                continue
            found = compare(named_tensors(mla, result), exact, bounds)
            yield LayerRow(implementation, name, ran, found.errors, found.bounds, "")


def _setup(implementation: str, dtype: torch.dtype, layers: str) -> Setup:
    """As a user has it: chunks are as long as by default, unlike in tests."""
    from absorbed_mla import AbsorbedMLAOptions
    from tests.support.harness import Setup

    options = AbsorbedMLAOptions()
    return Setup(
        form="auto",
        dtype=dtype,
        backend=layers,
        core_attention_backend=OURS.get(implementation, "auto"),
        query_chunk_size=options.query_chunk_size,
        expansion_chunk_size=options.expansion_chunk_size,
    )


def _run_layer(
    implementation: str,
    mla: OracleMLA,
    setup: Setup,
    weights: dict[str, Tensor],
    layout: Layout,
    x: Tensor,
    output_grad: Tensor,
) -> tuple[str, OracleResult]:
    """What the layer ran, and its output and gradients."""
    from benchmarks.kit.chosen_backends import ChosenBackends
    from tests.support.harness import build_attention, load_weights, run
    from tests.support.standard import build_standard, load_standard, run_standard

    if implementation == MEGATRON:
        standard = build_standard(mla, setup)
        load_standard(standard, mla, setup, weights)
        return "", run_standard(standard, mla, layout, x, output_grad)
    ours = build_attention(mla, setup)
    load_weights(ours, mla, setup, weights)
    ran = ChosenBackends(ours)
    result = run(ours, mla, setup, layout, x, output_grad)
    return str(ran), result


def _evaluate(
    mla: OracleMLA,
    weights: dict[str, Tensor],
    x: Tensor,
    output_grad: Tensor,
    layout: Layout,
    dtype: torch.dtype,
) -> OracleResult:
    """The oracle, on this process's device."""
    from tests import oracle
    from tests.support import world

    device = world.device()
    sequences = [
        oracle.TokenSequence(s.rows.to(device), s.visible.to(device)) for s in layout.sequences
    ]
    cos, sin = mla.rotary_table(layout.tokens)
    rows = [t.to(device).flatten(0, 1) for t in (x, output_grad)]
    found = oracle.evaluate(
        mla,
        {name: weight.to(device) for name, weight in weights.items()},
        *rows,
        sequences,
        (cos.to(device), sin.to(device)),
        dtype,
    )
    gradients = {name: gradient.cpu() for name, gradient in found.weight_grads.items()}
    return oracle.OracleResult(found.output.cpu(), found.input_grad.cpu(), gradients)


# ---- TransformerEngine's fused attention alone, by the widths of its heads


def measure_widths(
    heads: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[WidthRow]:
    """One sequence (``sbhd``) and a pack of two (``thd``), causal, beside float64."""
    from absorbed_mla.core_attention.backends.reference import ReferenceBackend
    from absorbed_mla.core_attention.backends.transformer_engine import TransformerEngineBackend
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from absorbed_mla.core_attention.masks.spans import Span
    from tests.support.numerics import relative_error

    cut = tokens * 5 // 16
    spans = {
        "sbhd": (Span(0, tokens, 0, tokens, 0),),
        "thd": (Span(0, cut, 0, cut, 0), Span(cut, tokens, cut, tokens, 0)),
    }
    for key_width, value_width in WIDTHS:
        for layout, seen in spans.items():
            rules = ScoreRules(key_width**-0.5, seen)
            inputs = _inputs(tokens, heads, key_width, value_width, device, dtype)
            exact = _outcome(ReferenceBackend(), [x.double() for x in inputs], rules)
            errors: dict[str, float] = {}
            error = ""
            try:
                found = _outcome(TransformerEngineBackend(), inputs, rules)
                errors = {name: relative_error(found[name], exact[name]) for name in exact}
            except Exception as problem:
                error = reason(problem)
            yield WidthRow(key_width, value_width, layout, errors, error)


def _inputs(
    tokens: int, heads: int, key: int, value: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Query, key, value and the output's gradient [S, 1, N, width], normal values."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shapes = [(tokens, 1, heads, width) for width in (key, key, value, value)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _outcome(
    backend: AttentionBackend, inputs: list[Tensor], rules: ScoreRules
) -> dict[str, Tensor]:
    """Output and gradients by name."""
    from absorbed_mla.core_attention.types import AttentionInputs, AttentionOutput, OutputGradient

    q, k, v, grad_out = inputs
    joined = AttentionInputs.multi_head(q, k, v)
    attended = backend.forward(joined, rules)
    attended = AttentionOutput(attended.out.to(q.dtype), attended.lse)
    found = backend.backward(OutputGradient(grad_out, None), attended, joined, rules)
    gradients = found.as_multi_head()
    return dict(zip(("output", "dq", "dk", "dv"), (attended.out, *gradients)))


# ---- report


def show(runs: Sequence[Findings]) -> None:
    """Print the tables, what failed and the verdict of each run."""
    for run in runs:
        tables = [layer_table(run), width_table(run)]
        texts = [table.text() for table in tables if table.lines]
        parts = [provenance.sentence(run.environment), *texts, *_failures(run), *verdict(run)]
        print("", *parts, sep="\n")


def layer_table(run: Findings) -> Table:
    """A line for each layer on each layout, a column for each tensor; "!" is out of bounds."""
    good = [row for row in run.layers if not row.error]
    tensors = list(dict.fromkeys(name for row in good for name in row.errors))
    words = ["layer", "layout", "ran"]
    head = [*words, *(n.replace(".weight", "").removeprefix("linear_") for n in tensors)]
    lines = [
        [row.implementation, row.layout, row.ran or "-", *(_cell(row, n) for n in tensors)]
        for row in good
    ]
    return Table("Layers", head, lines)


def width_table(run: Findings) -> Table:
    """A line for each pair of widths in each layout."""
    names = list(dict.fromkeys(name for row in run.widths for name in row.errors))
    lines = []
    for row in run.widths:
        found = [f"{row.errors[n]:.1e}" if n in row.errors else "-" for n in names]
        lines.append([str(row.key_width), str(row.value_width), row.layout, *found])
    head = ["key", "value", "layout", *names]
    return Table("The attention alone", head, lines)


def verdict(run: Findings) -> list[str]:
    """In words, a line for each implementation."""
    lines = [f"TransformerEngine runs cuDNN {run.cudnn}."]
    for name in dict.fromkeys(row.implementation for row in run.layers):
        rows = [row for row in run.layers if row.implementation == name]
        bad = [row for row in rows if row.out_of_bounds]
        failed = [row for row in rows if row.error]
        good = [row for row in rows if not row.error and not row.out_of_bounds]
        parts = [f"within bounds on {_named(good)}"] if good else []
        for row in bad:
            worst = max(row.out_of_bounds, key=lambda n: row.errors[n] / row.bounds[n])
            parts.append(f"WRONG on {row.layout} ({worst}: {row.errors[worst]:.1e})")
        parts += [f"not run on {row.layout} ({row.error})" for row in failed]
        lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def ours_is_off(run: Findings) -> bool:
    """Whether any layer of ours is above its bound, or none of ours ran."""
    ours = [row for row in run.layers if row.implementation.startswith("ours")]
    return any(row.out_of_bounds for row in ours) or all(row.error for row in ours)


def _named(rows: Sequence[LayerRow]) -> str:
    return ", ".join(row.layout.replace("thd, ", "thd of ") for row in rows)


def _failures(run: Findings) -> list[str]:
    """A line for each pair of widths that has no figures, with the reason."""
    return [
        f"Not measured: {row.key_width}/{row.value_width}, {row.layout}: {row.error}"
        for row in run.widths
        if row.error
    ]


def _cell(row: LayerRow, name: str) -> str:
    if name not in row.errors:
        return "-"
    text = f"{row.errors[name]:.1e}"
    return f"{text} !" if name in row.out_of_bounds else text


if __name__ == "__main__":
    sys.exit(main())
