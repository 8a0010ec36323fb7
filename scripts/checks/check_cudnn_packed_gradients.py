#!/usr/bin/env python3
"""Find out whether the cuDNN that TransformerEngine loads gives right gradients for packs.

    $ python scripts/check_cudnn_packed_gradients.py docs/megatron
    $ python scripts/check_cudnn_packed_gradients.py docs/megatron --render one.json other.json

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

import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

# A checkout runs without being installed; appended, so that an installed package wins.
sys.path.append(str(Path(__file__).resolve().parent.parent))
# Megatron warns about every optional package it does not find.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")

import provenance  # noqa: E402
from console.script import run_script  # noqa: E402
from context_parallel_benchmark.arguments import (  # noqa: E402
    DIMS,
    add_dims,
    check_files,
    count,
    dims_of,
    new_parser,
)
from packed_gradients import report  # noqa: E402
from packed_gradients.row import Findings  # noqa: E402

LEAST_TOKENS = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or render what was measured; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_script("check_cudnn_packed_gradients.py", lambda: _run(arguments))


def _run(argv: Sequence[str]) -> int | None:
    parser = new_parser("check_cudnn_packed_gradients.py", __doc__)
    add = parser.add_argument
    add("folder", type=Path, help=f"where {report.NAME}-cudnn-VERSION.json and .md go")
    add("--render", type=Path, nargs="+", metavar="FILE.json", help="measure nothing, render these")
    add("--tokens", type=count, default=2048, help="of a sequence or pack (%(default)s)")
    add("--heads", type=count, default=16, help="of the layers (%(default)s)")
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.tokens < LEAST_TOKENS:
        parser.error(f"--tokens must be at least {LEAST_TOKENS}, got {args.tokens}")
    check_files(args.folder, args.render or ())
    if args.render:
        return publish(args.folder, [report.read(f) for f in args.render])
    return measure(args)


def measure(args) -> int:
    """Measure, write, print; 1 if ours is off.

    Raises:
        ValueError: If there is no GPU or no TransformerEngine.
    """
    cudnn = _require_machine()
    import torch

    from packed_gradients.layers import measure_layers
    from packed_gradients.widths import measure_widths
    from tests.oracle import OracleMLA
    from tests.support import world

    for file in sorted(_cudnn_files()):
        print(f"cuDNN {cudnn}: {file}")
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
    report.write(found, args.folder)
    # Last: a kernel's fault takes the device away.
    for width in measure_widths(args.heads, args.tokens, world.device(), torch.bfloat16):
        found.widths.append(width)
    report.write(found, args.folder)
    publish(args.folder, [found])
    world.stop()
    return int(report.ours_is_off(found))


def publish(folder: Path, runs: Sequence[Findings]) -> None:
    """Write the Markdown, and print tables and verdicts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{report.NAME}.md").write_text(report.markdown(runs))
    for run in runs:
        print("", report.layer_table(run), report.width_table(run), *report.verdict(run), sep="\n")


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


def _environment(args) -> dict:
    import torch

    return {
        "date": provenance.today(),
        "command": shlex.join(["python", *sys.argv]),
        "commit": provenance.commit(),
        "device": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "tokens": args.tokens,
        "heads": args.heads,
        "dims": dims_of(args),
        "versions": provenance.attention_versions(on_gpu=True),
    }


if __name__ == "__main__":
    sys.exit(main())
