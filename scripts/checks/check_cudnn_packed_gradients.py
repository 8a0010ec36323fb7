#!/usr/bin/env python3
"""Check whether the cuDNN that TransformerEngine loads computes right gradients for packs.

    $ python scripts/checks/check_cudnn_packed_gradients.py docs/measurements/megatron

Megatron's standard MLA pads its values from 128 to 192 numbers in packs, and cuDNN 9.14 computes
wrong gradients for values that wide. This builds Megatron's MLASelfAttention of TransformerEngine's
layers and ours with the same weights, runs both forwards and backwards on one sequence and on packs
of 1, 2 and 5 documents, and compares output, input gradient and the gradient of every parameter
with a float64 evaluation of the equations. Every number goes into a JSON file. It needs a GPU and
TransformerEngine, and takes about a minute. The exit code is 1 if ours is wrong, and 0 otherwise,
whatever Megatron's gradients are; 2 after wrong input. To try another cuDNN, let CUDNN_HOME,
CUDNN_PATH and LD_LIBRARY_PATH point at it (docs/megatron.md).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
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

    from tests.oracle import OracleMLA, OracleResult
    from tests.support.layouts import Layout

SCRIPT = "check_cudnn_packed_gradients.py"
TOKENS, HEADS = 2048, 16
MEGATRON = "megatron"
# By the name of the row -> core_attention_backend.
OURS = {"ours": "auto", "ours, transformer_engine": "transformer_engine"}
# Where the documents of a pack end, in sixteenths of it.
_PACKS = {1: (16,), 2: (11, 16), 5: (1, 4, 5, 12, 16)}


@dataclass(frozen=True)
class LayerRow:
    """One layer on one layout: relative Frobenius errors of output and gradients, by name."""

    implementation: str
    layout: str
    ran: str = ""  # form and backend of ours
    errors: dict[str, float] = field(default_factory=dict)
    # Three times the error of a plain evaluation of the equations in this precision.
    bounds: dict[str, float] = field(default_factory=dict)
    error: str = ""  # why there are no figures

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
    rows = []
    for row in measure_layers(_dimensions(), TOKENS, torch.bfloat16):
        rows.append(row)
        print(row, flush=True)
    content = {"environment": _environment(), "layers": [asdict(row) for row in rows]}
    write_json(folder / f"packed_gradients-cudnn-{cudnn}.json", content)
    world.stop()
    return int(ours_is_wrong(rows))


def ours_is_wrong(rows: Sequence[LayerRow]) -> bool:
    """Whether any layer of ours is above its bound, or none of ours ran."""
    ours = [row for row in rows if row.implementation in OURS]
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

    names = ("hidden", "q_lora_rank", "kv_lora_rank", "nope", "rope", "v")
    return OracleMLA(heads=HEADS, **dict(zip(names, DIMS.values(), strict=True)))


def layouts(tokens: int) -> dict[str, Layout]:
    """One sequence, and packs of 1, 2 and 5 documents, by their names."""
    from tests.support.layouts import dense, packed

    found = {"sbhd": dense(tokens, 1)}
    for documents, ends in _PACKS.items():
        lengths = [tokens * end // 16 - tokens * start // 16 for start, end in pairwise((0, *ends))]
        found[f"thd, {documents} document{'s' if documents > 1 else ''}"] = packed(lengths)
    return found


def measure_layers(
    mla: OracleMLA,
    tokens: int,
    dtype: torch.dtype,
    layers: str = "transformer_engine",
    only=only_fused,
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
        rows = tuple(layout.random_rows(mla.hidden, seed).to(dtype) for seed in (1, 2))
        exact, eager = (
            named_tensors(mla, _evaluate(mla, weights, rows, layout, precision))
            for precision in (torch.float64, dtype)
        )
        bounds = bounds_from_eager(eager, exact, dtype)
        for implementation in (MEGATRON, *OURS):
            try:
                with only() if implementation == MEGATRON else nullcontext():
                    ran, result = _run_layer(implementation, mla, layers, weights, layout, rows)
            except Exception as error:
                yield LayerRow(implementation, name, error=reason(error))
                continue
            found = compare(named_tensors(mla, result), exact, bounds)
            yield LayerRow(implementation, name, ran, found.errors, found.bounds)


def _run_layer(
    implementation: str,
    mla: OracleMLA,
    layers: str,
    weights: dict[str, Tensor],
    layout: Layout,
    rows: tuple[Tensor, Tensor],
) -> tuple[str, OracleResult]:
    """What the layer ran, and its output and gradients of the tokens and the output's gradient."""
    from absorbed_mla import AbsorbedMLAOptions
    from benchmarks.kit.chosen_backends import ChosenBackends
    from tests.support.harness import Setup, build_attention, load_weights, run
    from tests.support.standard import build_standard, load_standard, run_standard

    # Chunks as a user has them, not as small as in tests.
    options = AbsorbedMLAOptions()
    setup = Setup(
        form="auto",
        dtype=rows[0].dtype,
        backend=layers,
        core_attention_backend=OURS.get(implementation, "auto"),
        query_chunk_size=options.query_chunk_size,
        expansion_chunk_size=options.expansion_chunk_size,
    )
    if implementation == MEGATRON:
        standard = build_standard(mla, setup)
        load_standard(standard, mla, setup, weights)
        return "", run_standard(standard, mla, layout, *rows)
    ours = build_attention(mla, setup)
    load_weights(ours, mla, setup, weights)
    ran = ChosenBackends(ours)
    result = run(ours, mla, setup, layout, *rows)
    return str(ran), result


def _evaluate(
    mla: OracleMLA,
    weights: dict[str, Tensor],
    rows: tuple[Tensor, Tensor],
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
    table = tuple(part.to(device) for part in mla.rotary_table(layout.tokens))
    weights = {name: weight.to(device) for name, weight in weights.items()}
    flat = (x.to(device).flatten(0, 1) for x in rows)
    found = oracle.evaluate(mla, weights, *flat, sequences, table, dtype)
    gradients = {name: gradient.cpu() for name, gradient in found.weight_grads.items()}
    return oracle.OracleResult(found.output.cpu(), found.input_grad.cpu(), gradients)


if __name__ == "__main__":
    sys.exit(main())
