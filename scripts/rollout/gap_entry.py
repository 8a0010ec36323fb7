"""Command line of rollout_gap.py, its table and its exit code."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from console.outputs import require_writable
from console.parser import Parser
from console.ranks import rank, world_size
from console.script import Failure, run_script
from rollout.arguments import add_num_tokens, parse_arguments

# Options of each run; parity mode comes last, because it stays on in the process.
CASES = tuple(
    f"{precision} {how}".strip()
    for how in ("--form absorbed", "--form expanded", "--form auto", "--batch-invariant")
    for precision in ("", "--bf16")
)
_EPILOG = """\
Options of the model, --load and --use-checkpoint-args are rollout_train.py's. The exit code is 1 if
a log-probability differs in parity mode."""


def main(argv: list[str]) -> int:
    """Run the script; returns ``run_script``'s exit code, and 1 for a gap in parity mode."""
    return run_script("rollout_gap.py", lambda: _measure(argv))


def _measure(argv: list[str]) -> None:
    own, model_options = _parser().parse_known_args(argv)
    _check(own, model_options)
    for name in ("megatron", "DynamicInferenceEngine"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Imported late, because it takes seconds: a wrong command line is reported at once.
    from training import megatron_loop  # first: it has Megatron imported as is quick on a CPU

    # isort: split
    from rollout.gap import measure_all

    rows: list[dict] = []
    for row in measure_all(own, model_options):
        rows.append(row)
        if rank():
            continue
        print(_line(row), flush=True)
        if own.json:
            Path(own.json).parent.mkdir(parents=True, exist_ok=True)
            Path(own.json).write_text(json.dumps(rows, indent=1) + "\n")
    require_parity(rows)
    megatron_loop.finish()


def require_parity(rows: list[dict]) -> None:
    """Check that log-probabilities are equal in parity mode.

    Args:
        rows: Of the table.

    Raises:
        Failure: If a row of parity mode has a difference; NaN is one.
    """
    for row in rows:
        if "--batch-invariant" in row["options"] and row["largest"] != 0:
            raise Failure(
                f"{row['options']}: the log-probabilities of rollout and trainer differ by "
                f"{row['largest']:.1e} at prompts of {row['prompt_length']} tokens"
            )


def _check(own: argparse.Namespace, model_options: list[str]) -> None:
    sizes = {
        "--prompt-lengths": min(own.prompt_lengths),
        "--samples": own.samples,
        "--num-tokens-to-generate": own.num_tokens_to_generate,
    }
    for option, least in sizes.items():
        if least < 1:
            raise ValueError(f"{option} must be at least 1, got {least}")
    # Options that all cases share.
    parse_arguments([*model_options, *CASES[0].split()], world_size())
    require_writable(files={"--json": own.json})


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rollout_gap.py",
        "Compare the log-probabilities of rollout and trainer, by torchrun or alone.",
        _EPILOG,
    )
    add = parser.add_argument
    add("--prompt-lengths", type=int, nargs="+", default=[16, 256], help="tokens before a sample")
    add("--samples", type=int, default=16, help="of each case")
    add_num_tokens(parser, default=64)
    add("--data", metavar="PATH", help="text of the prompts (default: as of train.py)")
    add("--json", metavar="FILE", help="where the table goes, too, after every row")
    return parser


def _line(row: dict) -> str:
    text = (
        "{options:<26} prompt {prompt_length:5d} | {tokens} tokens, entropy {entropy:.2f} | "
        "difference max {largest:.1e} mean {mean:.1e}, equal {share:.1f} % | KL {divergence:+.1e}"
    )
    return text.format(**row, share=100 * row["equal"])
