#!/usr/bin/env python3
"""Check whether the cuDNN that TransformerEngine loads computes right gradients for packs.

    $ python scripts/checks/check_cudnn_packed_gradients.py docs/measurements/megatron

Megatron's standard MLA pads its values from 128 to 192 numbers in packs, and cuDNN 9.14 computes
wrong gradients for values that wide. This builds Megatron's MLASelfAttention of TransformerEngine's
layers and ours with the same weights, runs both forwards and backwards on one sequence and on packs
of 1, 2 and 5 documents, and compares output, input gradient and the gradient of every parameter
with a float64 evaluation of the equations; then TransformerEngine's attention alone, with heads of
several widths. Every number goes into a JSON file. It needs a GPU and TransformerEngine, and takes
about a minute. The exit code is 1 if ours is wrong, and 0 otherwise, whatever Megatron's gradients
are; 2 after wrong input. To try another cuDNN, let CUDNN_HOME, CUDNN_PATH and LD_LIBRARY_PATH point
at it (docs/megatron.md).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.kit import provenance
from benchmarks.kit.arguments import DIMS
from benchmarks.kit.report import reason, write_json
from benchmarks.peers.attention import only_fused
from console.outputs import require_writable
from console.parser import Parser
from console.script import run_script

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from absorbed_mla.core_attention.backend import AttentionBackend
    from absorbed_mla.core_attention.masks.scores import ScoreRules
    from tests.oracle import OracleMLA, OracleResult
    from tests.support.layouts import Layout

SCRIPT = "check_cudnn_packed_gradients.py"
TOKENS, HEADS = 2048, 16
MEGATRON = "megatron"
# By the name of the row -> core_attention_backend.
OURS = {"ours": "auto", "ours, transformer_engine": "transformer_engine"}
# Widths of key and value: Megatron pads the value of packs to the key's width.
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 128), (256, 256))
# Where the documents of a pack end, in sixteenths of it.
_PACKS = {1: (16,), 2: (11, 16), 5: (1, 4, 5, 12, 16)}


@dataclass(frozen=True)
class LayerRow:
    """One layer on one layout.

    Attributes:
        implementation: Whose layer.
        layout: Name of the layout.
        ran: Form and backend of ours.
        errors: Relative Frobenius error of the output and every gradient, by name.
        bounds: Three times the error of a plain evaluation of the equations in this precision, by
            the same names.
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

    def __str__(self) -> str:
        if self.error:
            return f"{self.implementation}, {self.layout}: not run: {self.error}"
        verdict = "WRONG" if self.out_of_bounds else "right"
        worst = max(self.errors, key=lambda name: self.errors[name] / self.bounds[name])
        figures = f"{self.errors[worst]:.1e}, bound {self.bounds[worst]:.1e}"
        return f"{self.implementation}, {self.layout}: {verdict} (worst: {worst} {figures})"


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

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {x:.1e}" for name, x in self.errors.items())
        widths = f"{self.key_width}/{self.value_width}"
        return f"attention alone, widths {widths}, {self.layout}: {self.error or figures}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and print; returns the exit code."""
    return run_script(SCRIPT, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(SCRIPT, __doc__)
    files = "folder for packed_gradients-cudnn-VERSION.json"
    parser.add_argument("folder", type=Path, help=files)
    folder = parser.parse_args(argv).folder
    require_writable(folders={"folder": folder})
    cudnn = _require_machine()
    import torch

    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")
    from tests.support import world

    # The library as this process has loaded it.
    maps = Path("/proc/self/maps").read_text().splitlines()
    for file in sorted({line.split()[-1] for line in maps if "/libcudnn.so" in line}):
        print(f"cuDNN {cudnn}: {file}")
    world.start()
    content: dict = {"environment": _environment(), "layers": [], "widths": []}
    path = folder / f"packed_gradients-cudnn-{cudnn}.json"
    layers = []
    for row in measure_layers(_dimensions(), TOKENS, torch.bfloat16):
        layers.append(row)
        content["layers"].append(asdict(row))
        print(row, flush=True)
    write_json(path, content)
    # Last: a kernel's fault takes the device away.
    for width in measure_widths(HEADS, TOKENS, world.device(), torch.bfloat16):
        content["widths"].append(asdict(width))
        print(width, flush=True)
    write_json(path, content)
    world.stop()
    return int(ours_is_wrong(layers))


def ours_is_wrong(rows: Sequence[LayerRow]) -> bool:
    """Whether any layer of ours is above its bound, or none of ours ran."""
    ours = [row for row in rows if row.implementation.startswith("ours")]
    return any(row.out_of_bounds for row in ours) or all(row.error for row in ours)


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


def _environment() -> dict:
    return provenance.describe(True, "bfloat16", tokens=TOKENS, heads=HEADS, dims=DIMS)


def _dimensions() -> OracleMLA:
    """DeepSeek-V3's, with fewer heads."""
    from tests.oracle import OracleMLA

    return OracleMLA(
        hidden=DIMS["hidden-size"],
        heads=HEADS,
        q_lora_rank=DIMS["q-lora-rank"],
        kv_lora_rank=DIMS["kv-lora-rank"],
        nope=DIMS["qk-head-dim"],
        rope=DIMS["qk-pos-emb-head-dim"],
        v=DIMS["v-head-dim"],
    )


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
    """Every layer on every layout, with the same weights and tokens.

    Args:
        mla: Dimensions.
        tokens: Of each layout.
        dtype: Of weights and activations.
        layers: ``transformer_impl`` of all layers.
        only: Makes TransformerEngine take no attention but cuDNN's.
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
            run = partial(_run_layer, implementation, mla, layers, weights)
            try:
                with only() if implementation == MEGATRON else nullcontext():
                    ran, result = run(layout, x, output_grad)
            except Exception as error:
                yield LayerRow(implementation, name, "", {}, {}, reason(error))
                continue
            found = compare(named_tensors(mla, result), exact, bounds)
            yield LayerRow(implementation, name, ran, found.errors, found.bounds, "")


def _run_layer(
    implementation: str,
    mla: OracleMLA,
    layers: str,
    weights: dict[str, Tensor],
    layout: Layout,
    x: Tensor,
    output_grad: Tensor,
) -> tuple[str, OracleResult]:
    """What the layer ran, and its output and gradients."""
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.chosen_backends import ChosenBackends
    from tests.support.harness import Setup, build_attention, load_weights, run
    from tests.support.standard import build_standard, load_standard, run_standard

    # Chunks as a user has them, not as small as in tests.
    options = AbsorbedMLAOptions()
    setup = Setup(
        form="auto",
        dtype=x.dtype,
        backend=layers,
        core_attention_backend=OURS.get(implementation, "auto"),
        query_chunk_size=options.query_chunk_size,
        expansion_chunk_size=options.expansion_chunk_size,
    )
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
    """The equations in ``dtype``, on this process's device."""
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


if __name__ == "__main__":
    sys.exit(main())
