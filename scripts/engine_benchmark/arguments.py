"""The command line, and the cases that it asks for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from absorbed_mla.options import FORMS, PAGED_ATTENTION_BACKENDS
from console.outputs import require_writable
from context_parallel_benchmark.arguments import (
    DIMS,
    add_dims,
    count,
    list_of,
    new_parser,
    one_of,
    seconds,
)

IMPLEMENTATIONS = ("ours", "standard")
SCOPES = ("layer", "block")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Case:
    """One way of running all requests.

    Attributes:
        implementation: ``"ours"`` or ``"standard"``, Megatron's MLASelfAttention.
        graphs: Whether steps are replayed from CUDA graphs.
    """

    implementation: str
    graphs: bool

    def __str__(self) -> str:
        return f"{self.implementation}, {'CUDA graphs' if self.graphs else 'eager'}"


def cases(args: argparse.Namespace) -> list[Case]:
    """Eager ones first: what a graph breaks may take the device away."""
    ways = (False, True) if args.num_cuda_graphs else (False,)
    return [Case(one, graphs) for graphs in ways for one in args.implementations]


def parse_arguments(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.

    Args:
        argv: Without the program's name.
        description: What ``--help`` begins with.

    Raises:
        ValueError: After wrong input.
    """
    parser = new_parser("bench_engine.py", description)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="where the report goes, after every case")
    add("--device", choices=("cuda", "cpu"), help="where it runs (default: cuda if there is a GPU)")
    add(
        "--dtype",
        choices=DTYPES,
        help="of the model (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add(
        "--implementations",
        type=list_of(one_of(IMPLEMENTATIONS)),
        default="ours,standard",
        help="whose attention",
    )
    add("--form", choices=FORMS, default="auto", help="how ours is executed")
    add(
        "--paged-attention-backend",
        choices=PAGED_ATTENTION_BACKENDS,
        default="auto",
        help="of ours, over the cache",
    )
    add("--batch-invariant", action="store_true", help="ours in parity mode: no ties")
    add("--requests", type=count, default=200, help="that come at once")
    add("--longest-prompt", type=count, default=1024, help="in tokens")
    add("--shared-prefix", type=count, default=256, help="tokens of half of the prompts")
    add("--longest-output", type=count, default=128, help="in tokens")
    add("--max-requests", type=count, default=64, help="in one forward")
    add("--max-tokens", type=count, default=1024, help="in one forward")
    add(
        "--blocks",
        type=count,
        help="of 64 tokens in the cache (default: too few for --max-requests)",
    )
    add(
        "--num-cuda-graphs",
        type=_any_count,
        default=16,
        help="sizes of steps that are captured, 0 for none",
    )
    add("--cuda-graph-scope", choices=SCOPES, default="layer", help="what a graph holds")
    add("--tie", type=seconds, help="log-probs this near are a tie (default: 0.1; in float32 1e-3)")
    add("--num-layers", type=count, default=4, help="of the model")
    add("--heads", type=count, default=128, help="of the model")
    add("--ffn-hidden-size", type=count, default=2048, help="width of the MLP")
    add("--vocab-size", type=count, default=32768, help="rows of the embedding")
    add("--time-limit", type=seconds, default=480.0, help="no case begins later, in s")
    add("--seed", type=int, default=1234, help="of weights and requests")
    add_dims(parser, DIMS)
    args = parser.parse_args(argv)
    if args.max_tokens % 64:
        parser.error(f"--max-tokens must be a multiple of 64 for Megatron, got {args.max_tokens}")
    if args.max_tokens < args.max_requests:
        parser.error(
            f"--max-tokens must be at least --max-requests={args.max_requests}, "
            f"got {args.max_tokens}"
        )
    if args.shared_prefix >= args.longest_prompt:
        parser.error(
            f"--shared-prefix must be below --longest-prompt={args.longest_prompt}, "
            f"got {args.shared_prefix}"
        )
    require_writable(files={"--json": args.json})
    return args


def _any_count(text: str) -> int:
    return 0 if text.strip() == "0" else count(text)
